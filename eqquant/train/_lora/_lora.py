import dataclasses
import math
import warnings
from collections.abc import Iterable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PRNGKeyArray, PyTree

from ..._array import is_quantized
from ..._tree import (
    decide,
    FilterSpec,
    layers_on_call,
    leaves_with_info,
    needing_dense,
    put_on_call,
    rebuilt,
    Request,
    smallest_on_call,
)
from ...formats import AbstractFormat, from_bits
from .._low_precision import is_low_precision, plain
from ._array import LoRA, square_norms
from ._matrix import matrix_of


def lora(
    model: PyTree,
    rank: int,
    filter_spec: FilterSpec = True,
    *,
    alpha: float | int | None = None,
    rank_stabilized: bool = False,
    dora: bool = False,
    min_size: int = 1024,
    embeddings: bool = False,
    dtype: Any = jnp.float32,
    example: Any = None,
    key: PRNGKeyArray,
) -> tuple[PyTree, PyTree[bool]]:
    """Adds low-rank adapters to the weights of a model, which may be quantized (QLoRA)
    or dense (LoRA). Only the adapters train. The layers are called as before, and the
    model computes the same function until the first step.

    !!! Example

        ```python
        model = eqquant.tree_quantize(model, "nf4")
        model, spec = eqquant.train.lora(model, rank=16, key=key)
        adapters, frozen = eqx.partition(model, spec)
        state = optimizer.init(adapters)

        @eqx.filter_value_and_grad
        def loss(adapters, frozen, x, y):
            model = eqx.combine(adapters, frozen)
            ...
        ```

    **Arguments:**

    - `model`: any PyTree.
    - `rank`: the rank of the adapters. An `n` by `k` weight gets `rank * (n + k)`
        trainable numbers.
    - `filter_spec`, `min_size`, `embeddings`: which weights get adapters, as in
        [`eqquant.tree_quantize`][]. Quantized weights, dense weights and weights of
        [`eqquant.train.tree_compute`][] are treated alike, and a format in
        `filter_spec` means the same as `True`. If products contract several axes of a
        weight, or an axis that others follow (as known from an `example` or from its
        quantization), the adapter is for the matrix that products see: `in` by
        `heads * head`. The filter of a convolution gets an adapter if it is quantized,
        if a rule names it, or with an `example`: the adapter is a convolution to `rank`
        channels with the same window, followed by a pointwise one. (Its layer then runs
        through [`eqquant.implicit`][].)
    - `alpha`: the product of the adapters is scaled by `alpha / rank`. Defaults to
        `rank`.
    - `rank_stabilized`: whether to scale by `alpha / sqrt(rank)` instead (rsLoRA).
    - `dora`: whether to train the norm of each row, too (DoRA).
    - `dtype`: the dtype of the adapters.
    - `example`: arguments that the model may be called with, or `(fn, args)`, as in
        [`eqquant.tree_quantize`][]. Its trace shows which dense arrays are weights,
        such as those of `jnp.einsum`s, convolutions and layers of any class, along
        which axes, and which modules have to run through [`eqquant.implicit`][].
    - `key`: a random key for their initial values.

    **Returns:**

    The model, with a [`eqquant.train.LoRA`][] in place of each selected weight, and a
    PyTree of booleans for `eqx.partition` that is true for the adapters. (To train
    other arrays as well, such as norms, set their leaves to `True`.)

    **Raises:**

    A `ValueError` if no weight is selected, if a rule matches nothing or names an array
    that cannot have adapters, or if the model already has adapters; with `example`, for
    a weight that the call of the model cannot take. Warns of weights that get no
    adapter because they are dense filters of convolutions, or not matrices, and of
    dense arrays whose contracted axis is a guess.

    ??? cite "Reference"

        LoRA: Low-Rank Adaptation of Large Language Models. Hu et al., 2022.

        QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023.

        A Rank Stabilization Scaling Factor for Fine-Tuning with LoRA. Kalajdzievski,
        2023.

        DoRA: Weight-Decomposed Low-Rank Adaptation. Liu et al., 2024.
    """
    _check_rank(rank)
    check_no_adapters(model)
    alpha = rank if alpha is None else alpha
    if not eqx.is_array_like(alpha):
        raise TypeError(f"`alpha` should be a number. Got {alpha!r}.")
    scale = float(alpha / (math.sqrt(rank) if rank_stabilized else rank))
    leaves = jtu.tree_leaves(model, is_leaf=is_weight)
    # Quantized and low-precision weights count like dense ones.
    chosen = decide(
        jtu.tree_map(plain, model, is_leaf=is_weight),
        filter_spec,
        min_size=min_size,
        embeddings=embeddings,
        is_done=lambda x: False,
        unsupported="on_call",
        goal="adapted",
        example=example,
        known=[leaf.axis if is_weight(leaf) else None for leaf in leaves],
    )
    by_default = filter_spec is True or isinstance(filter_spec, AbstractFormat | str)
    selected = [d.info if d.format is not None else None for d in chosen]
    if by_default and example is None:
        selected = _on_call_already(leaves, selected)
    selected = _adaptable(chosen, selected)
    number = sum(info is not None for info in selected)
    if number == 0:
        raise ValueError(
            "`filter_spec` should select at least one weight of `model`. It selects "
            f"none{_why(chosen)}"
        )
    _warn_of_guesses(leaves, selected)
    keys = iter(jr.split(key, number))

    def adapt(leaf, info):
        if info is None:
            return leaf
        axis = info.axis
        stack, n, k = rows_first(leaf.shape, axis, info.path)
        bound = 1 / math.sqrt(max(1, k))
        a = jr.uniform(next(keys), (*stack, rank, k), dtype, -bound, bound)
        b = jnp.zeros((*stack, n, rank), dtype)
        w = LoRA(leaf, a, b, None, None, axis=axis, scale=scale)
        return with_magnitude(w, dtype) if dora else w

    model = adapted(model, map(adapt, leaves, selected), example)
    return model, lora_spec(model)


def adapted(model: PyTree, leaves: Iterable[Any], example: Any) -> PyTree:
    """Returns the model with other leaves, some of which have adapters. The modules
    that have to run through [`eqquant.implicit`][] do so: modules that a call needs, or
    without an `example`, Equinox layers."""
    leaves = [*leaves]
    if example is None:
        treedef = jtu.tree_structure(model, is_leaf=is_weight)
        return layers_on_call(jtu.tree_unflatten(treedef, leaves), is_lora)
    request = Request(model, example=example, is_done=is_weight, goal="adapted")
    found = [*leaves_with_info(model, is_weight)]
    callers = smallest_on_call(request, found, leaves, {})
    return rebuilt(model, leaves, put_on_call(callers), is_weight)


def _on_call_already(leaves, infos):
    # (A layer runs on call only if that was requested.)
    dense = [
        info.path
        for leaf, info in zip(leaves, infos, strict=True)
        if info is not None and needing_dense(info) and not is_weight(leaf)
    ]
    if dense:
        warnings.warn(
            f"No adapters for {_named(dense)}, of a layer that needs dense arrays, as "
            "convolutions do. It has them with an `example`, if a rule names it, or if "
            "it is quantized.",
            stacklevel=3,
        )
    return [None if x is not None and x.path in dense else x for x in infos]


def _adaptable(decisions, infos):
    # (If a filter names such a weight, it is an error instead.)
    left = [
        info.path
        for decision, info in zip(decisions, infos, strict=True)
        if info is not None
        and not decision.named
        and matrix_of(info.shape, info.axis) is None
    ]
    if left:
        warnings.warn(
            f"No adapters for {_named(left)}: its products do not contract axes of a "
            "matrix next to each other.",
            stacklevel=3,
        )
    return [None if x is not None and x.path in left else x for x in infos]


def _warn_of_guesses(leaves, infos):
    """Warns of dense arrays with more than two axes whose contracted axis is
    unknown."""
    doubtful = [
        f"`{info.path}`, of shape {info.shape}, along axis {info.axis}"
        for leaf, info in zip(leaves, infos, strict=True)
        if info is not None
        and not is_weight(leaf)
        and len(info.shape) > 2
        and info.multiplied is None
        and not (info.owner is not None and info.known)
    ]
    if doubtful:
        more = f" (and {len(doubtful) - 1} more)" if len(doubtful) > 1 else ""
        warnings.warn(
            f"Adapters of {doubtful[0]}{more} are for a stack of matrices, which is a "
            "guess. Pass `example=`, the arguments of a call or `(fn, args)`, to find "
            "the axes; or register the axis of a field by `eqquant.register_owner`.",
            stacklevel=3,
        )


def _why(decisions):
    left = [(d.info.path, d.skip) for d in decisions if d.info and d.skip]
    left = [(path, skip) for path, skip in left if skip.kind not in ("vector", "bias")]
    lines = [
        f"\n- `{path}`: {skip.reason}.{f' {skip.hint}.' if skip.hint else ''}"
        for path, skip in left[:3]
    ]
    more = [f"\n- and {len(left) - 3} more."] if len(left) > 3 else []
    return f":{''.join((*lines, *more))}" if lines else ": there are no matrices."


def _named(paths):
    more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
    return f"`{paths[0]}`{more}"


def lora_spec(model: PyTree) -> PyTree[bool]:
    """Returns the filter for training adapters: true for their arrays, false for every
    other leaf. A model that is sharded or prepacked afterwards needs a new one, since
    static fields of its quantized arrays change.

    **Arguments:**

    - `model`: a model with adapters, as from [`eqquant.train.lora`][].

    **Returns:**

    A PyTree of booleans, for `eqx.partition` and `eqx.filter`.
    """
    where = lambda w: (w.a, w.b, w.magnitude)

    def spec(node):
        frozen = jtu.tree_map(lambda _: False, node)
        if not is_lora(node):
            return frozen
        trains = jtu.tree_map(lambda _: True, where(node))
        return eqx.tree_at(where, frozen, trains, is_leaf=lambda x: x is None)

    return jtu.tree_map(spec, model, is_leaf=is_lora)


def is_weight(x: Any) -> bool:
    """Whether this takes the place of a weight, quantized or in low precision, that may
    have an adapter."""
    return is_quantized(x) or is_low_precision(x)


def is_lora(x: Any) -> bool:
    return isinstance(x, LoRA)


def check_no_adapters(model: PyTree) -> None:
    if any(map(is_lora, jtu.tree_leaves(model, is_leaf=is_lora))):
        raise ValueError(
            "`model` should have no adapters. To keep training them, use the model as "
            "it is; to add new ones, call `eqquant.train.merge_lora` first."
        )


def rows_first(
    shape: tuple[int, ...], axis: Any, path: str
) -> tuple[tuple[int, ...], int, int]:
    """Returns the sizes of a stack of matrices, their number of rows, and the number of
    columns that products contract."""
    matrix = matrix_of(shape, axis)
    if matrix is None:
        raise ValueError(
            "Adapters need a matrix, or a stack of matrices, whose products contract "
            f"axes next to each other. Got `{path}`, of shape {shape} and axis {axis}."
        )
    return matrix.stack, matrix.n, matrix.k


def with_magnitude(w: LoRA, dtype: Any) -> LoRA:
    """Converts LoRA to DoRA. The initial magnitudes are the row norms of the base."""
    norm = square_norms(w.base, w.axis)
    magnitude = jnp.sqrt(from_bits(norm, jnp.dtype(jnp.float32))).astype(dtype)
    return dataclasses.replace(w, magnitude=magnitude, norm=norm)


def _check_rank(rank):
    if isinstance(rank, bool) or not isinstance(rank, int | np.integer):
        raise TypeError(f"`rank` should be an integer. Got {rank!r}.")
    if rank < 1:
        raise ValueError(f"`rank` should be 1 or more. Got {rank}.")
