from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from .._array import identity, QuantizedArray
from .._product import as_tuple, Axis, normalise_axis
from .._solvers import AbstractMethod, squared_errors
from .._trace import Gram, Statistics
from .._tree import (
    check,
    check_alone,
    decide,
    Decision,
    grams_of,
    LeafInfo,
    opened,
    rounded,
    Rules,
)
from ..formats import AbstractFormat, as_format, Int, Int4, Int8
from ._allocation import Sensitivity, SensitivityRow
from ._predicted import Predictor


# With so few bits for each weight, 32-bit scales, short blocks and minima cost more
# bits than they are worth. The exception is the minimum of 2-bit codes, which would
# have only three levels without it.
_half = jnp.bfloat16
_formats = (
    Int(2, 128, "minimum", scale_dtype=_half),
    Int(3, 128, scale_dtype=_half),
    Int4(128, scale_dtype=_half),
    Int(5, 128, scale_dtype=_half),
    Int(6, 128, scale_dtype=_half),
    Int8(128, scale_dtype=_half),
)


def sensitivity(
    model: PyTree,
    stats: Statistics | None = None,
    formats: Sequence[AbstractFormat | str] = _formats,
    *,
    loss: Callable[[PyTree], Any] | None = None,
    gradients: PyTree | None = None,
    method: AbstractMethod | None = None,
    together: Callable[[LeafInfo], Hashable] | None = None,
    axis: Axis | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    example: Any = None,
) -> Sensitivity:
    """Measures the error of each weight of a model in each of several formats.

    Statistics measure the error of the products of a weight, but not its effect on the
    rest of the model. If there is time, also pass a `loss`, and enough data that its
    differences are not noise.

    !!! Example

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        found = eqquant.sensitivity(model, stats)
        print(found)
        model = eqquant.tree_quantize(model, found.allocate(bits=4.0), stats=stats)
        ```

    **Arguments:**

    - `model`: any PyTree.
    - `stats`: statistics of the inputs of weights, from [`eqquant.calibrate`][]. The
        error of a weight in a format is the squared error of its products for one row
        of inputs: `tr(e H e^T)` divided by the number of rows, where `H` is the Gram
        matrix, and `e` is the rounding error of the weight. Without `stats`, inputs are
        assumed to have unit variance: the error is `|e|^2`. The same holds, with a
        warning, for weights that `stats` does not contain.
    - `formats`: the formats to choose from. By default, integers of 2 to 8 bits in
        blocks of 128, with scales in bfloat16.
    - `loss`: if given, the error of a weight in a format is instead the increase of
        `loss(model)` when only this weight is rounded. It is called once for each
        weight and format, with a model of ordinary arrays. A jitted function is
        compiled only once.
    - `gradients`: the result of [`eqquant.squared_gradients`][] with the same `stats`.
        If given, the errors are predicted: the increase of the loss, up to a factor, if
        each weight is rounded by `GPTQ()`. The prediction is the squared gradient times
        the noise of the format. Only a few rows of each weight are rounded.
    - `method`: the method that rounds numbers, as in [`eqquant.tree_quantize`][]. By
        default they are rounded to nearest, even with `stats`. Formats to which the
        method does not apply are rounded to nearest if it applies to another format.
    - `together`: a function from an [`eqquant.LeafInfo`][] to a key. Weights with the
        same key get the same format. The key `None` groups a weight with no other. All
        uses of a shared array always get the same format.
    - `axis`, `min_size`, `embeddings`, `example`: which arrays are weights, as in
        [`eqquant.tree_quantize`][]. Pass the same `axis` and `example` to both.

    **Returns:**

    A [`eqquant.Sensitivity`][]: its `allocate(bits)` chooses a format for each weight.

    **Raises:**

    A `ValueError` if no weight is found, if there are no formats, if a format cannot
    represent a weight, if the model has `jax.ShapeDtypeStruct`s for arrays, if `stats`
    or `gradients` are from another model, if the method needs statistics and there are
    none, if the method is `AWQ`, if `loss` is not finite, and if `gradients` are given
    with a `loss` or a `method`, or without `stats`.
    """
    if isinstance(formats, str) or not isinstance(formats, Iterable):
        raise TypeError(
            f"`formats` should be a sequence of formats, or of names. Got {formats!r}."
        )
    formats = tuple(as_format(format) for format in formats)
    if not formats:
        raise ValueError("`formats` should have at least one format. Got none.")
    check_alone(method)
    check(stats, method)
    if gradients is not None and (loss is not None or method is not None):
        raise ValueError(
            "With `gradients`, the errors of `GPTQ()` are predicted, so `loss` and "
            f"`method` should be None. Got {loss} and {method}."
        )
    if gradients is not None and stats is None:
        raise ValueError(
            "With `gradients`, `stats` should be those that were passed to "
            "`squared_gradients`. Got None."
        )
    of_loss = None if gradients is None else _by_array(opened(model), gradients)
    decisions = decide(
        opened(model),
        axis=axis,
        min_size=min_size,
        embeddings=embeddings,
        example=example,
    )
    otherwise = None
    if loss is None:
        otherwise = "its inputs are assumed to have unit variance"
    elif method is not None and method.needs_gram:
        otherwise = "`ScaleSearch()` rounds it"
    known = {} if stats is None else grams_of(decisions, stats, otherwise, 4)
    most = max((float(np.max(gram.rows)) for gram in known.values()), default=1.0)
    if most == 0:
        raise ValueError(
            "`stats` should come from batches with at least one row. Got zero rows."
        )
    base = 0.0 if loss is None else float(loss(model))

    # As in `tree_quantize`, formats to which the method does not apply are rounded to
    # nearest if it applies to another format.
    some = method is not None and any(method.applies(format) for format in formats)

    def rounded_each(arrays: list[_Weight], format: AbstractFormat):
        nearest = some and method is not None and not method.applies(format)
        by = None if nearest else method
        each = [_rounded(weight, format, by) for weight in arrays]
        bits = sum(8 * q.nbytes for q in each) / sum(q.size for q in each)
        if loss is None:
            found = (_squared_error(w, q, most) for w, q in zip(arrays, each))
            return bits, sum(found)
        dense = {identity(w.leaf): q.dequantize() for w, q in zip(arrays, each)}
        after = float(loss(_with(model, dense)))
        if not np.isfinite(after - base):
            raise ValueError(
                f"`loss` should be finite. Got {base}, and {after} with "
                f"`{arrays[0].info.path}` in {format}."
            )
        return bits, after - base

    predictor = Predictor()

    def predicted(arrays: list[_Weight], format: AbstractFormat):
        assert of_loss is not None
        each = [
            predictor(w.leaf, w.info.axis, format, w.gram, of_loss[identity(w.leaf)])
            for w in arrays
        ]
        sizes = [w.leaf.size for w in arrays]
        bits = sum(p.bits * n for p, n in zip(each, sizes)) / sum(sizes)
        return bits, sum(p.error for p in each)

    measured = rounded_each if of_loss is None else predicted
    rows = []
    for group in _groups(decisions, together):
        arrays = {
            identity(leaf): _Weight(leaf, info, known.get(identity(leaf)))
            for leaf, info in reversed(group)
        }
        arrays = [*arrays.values()]
        each = [measured(arrays, format) for format in formats]
        row = SensitivityRow(
            paths=tuple(dict.fromkeys(info.path for _, info in group)),
            size=sum(weight.leaf.size for weight in arrays),
            bits=tuple(bits for bits, _ in each),
            errors=tuple(error for _, error in each),
        )
        rows.append(row)
    return Sensitivity(tuple(rows), formats, _measure(stats, loss, gradients))


def allocate(
    model: PyTree,
    stats: Statistics | None = None,
    bits: float | int = 4.0,
    formats: Sequence[AbstractFormat | str] = _formats,
    **options: Any,
) -> Rules:
    """Chooses a format for each weight of a model within a budget of bits.

    !!! Example

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        rules = eqquant.allocate(model, stats, bits=4.0)
        model = eqquant.tree_quantize(model, rules, stats=stats)
        ```

    **Arguments:**

    - `model`, `stats`, `formats`, `options`: the arguments of
        [`eqquant.sensitivity`][], which measures the error of each weight in each
        format.
    - `bits`: the largest mean of bits per weight, scales included.

    **Returns:**

    [`eqquant.Rules`][] with a rule for each weight. They minimise the sum of the errors
    within the budget.

    **Raises:**

    The errors of [`eqquant.sensitivity`][], and a `ValueError` if `bits` is less than
    the smallest formats take.
    """
    return sensitivity(model, stats, formats, **options).allocate(bits)


class _Weight(NamedTuple):
    leaf: Any
    info: LeafInfo
    gram: Gram | None


def _groups(
    decisions: Sequence[Decision], together: Callable[[LeafInfo], Hashable] | None
) -> list[list[tuple[Any, LeafInfo]]]:
    """Returns the weights, in lists of weights that get the same format."""
    groups: list[tuple[set[Hashable], list[tuple[Any, LeafInfo]]]] = []
    for decision in decisions:
        info, leaf = decision.info, decision.leaf
        if info is None or decision.format is None:
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct):
            raise ValueError(
                f"`model` should have arrays to round. `{info.path}` is a "
                "`jax.ShapeDtypeStruct`."
            )
        # Rules choose by paths, so arrays whose dotted paths are the same, as in
        # `{"a.b": w, "a": {"b": w}}`, cannot have different formats.
        keys: set[Hashable] = {("array", identity(leaf)), ("path", info.path)}
        key = None if together is None else together(info)
        if key is not None:
            keys.add(("together", key))
        first, members = len(groups), [(leaf, info)]
        for i in reversed(range(len(groups))):
            if groups[i][0] & keys:
                others, before = groups.pop(i)
                first, keys, members = i, keys | others, [*before, *members]
        groups.insert(first, (keys, members))
    if not groups:
        raise ValueError(
            "`model` should have weights to quantize. Found none: "
            "`eqquant.report(model)` lists the reasons."
        )
    return [members for _, members in groups]


def _by_array(model: PyTree, gradients: PyTree) -> dict[Hashable, Any]:
    """Maps the identity of each array to its squared gradient."""
    leaves = lambda tree: jtu.tree_leaves(tree, is_leaf=lambda x: x is None)
    arrays, found = leaves(model), leaves(opened(gradients))
    scalar = lambda a: a is None or np.ndim(a) == 0
    if len(arrays) != len(found) or not all(map(scalar, found)):
        raise ValueError(
            "`gradients` should come from `squared_gradients` of this model, with one "
            f"number for each of its {len(arrays)} leaves. Got {len(found)} leaves, "
            f"{sum(not scalar(a) for a in found)} of them arrays."
        )
    pairs = [(identity(a), g) for a, g in zip(arrays, found) if g is not None]
    # A shared array has a gradient from each of its places.
    total: dict[Hashable, Any] = {}
    for key, g in pairs:
        total[key] = total.get(key, 0) + g
    return total


def _rounded(
    weight: _Weight, format: AbstractFormat, method: AbstractMethod | None
) -> QuantizedArray:
    leaf, info, gram = weight
    try:
        return rounded(leaf, format, info.axis, method, gram)
    except ValueError as e:
        raise ValueError(f"Could not quantize `{info.path}`: {e}") from e


def _squared_error(weight: _Weight, q: QuantizedArray, rows: float) -> float:
    leaf, info, gram = weight
    axes = tuple(sorted(as_tuple(normalise_axis(info.axis, leaf.shape))))
    value = None if gram is None else gram.value
    error = leaf.astype(jnp.float32) - q.dequantize().astype(jnp.float32)
    error = float(jnp.sum(squared_errors(error, value, axes)))
    return error if gram is None else error / rows


def _with(model: PyTree, arrays: dict[Hashable, Any]) -> PyTree:
    """Returns the model with some of its arrays replaced."""
    return jtu.tree_map(lambda x: arrays.get(identity(x), x), model)


def _measure(stats: Statistics | None, loss: Callable | None, gradients: Any) -> str:
    if gradients is not None:
        return "Predicted increase of the loss, up to a factor."
    if loss is not None:
        return "Increase of the loss if only this weight is rounded."
    if stats is not None:
        return "Squared errors of the products, per row of inputs."
    return "Squared errors of the weights."
