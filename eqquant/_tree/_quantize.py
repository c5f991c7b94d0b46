import dataclasses
import functools as ft
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding
from jaxtyping import PyTree

from .._array import is_quantized, once_per_array, quantize, QuantizedArray
from .._product import Axis, full_spec
from ..formats import AbstractFormat, NF4
from ._decide import decide, Decision, FilterSpec, Unsupported
from ._example import Example, modules_on_call
from ._fold import folded
from ._jitted import closed, opened
from ._on_call import is_on_call, not_on_call, put_on_call, rebuilt
from ._rounding import rounding
from ._sequential import is_sequential, rounding_in_sequence


if TYPE_CHECKING:
    from .._solvers import AbstractMethod
    from .._trace import Sequential, Statistics


def tree_quantize(
    model: PyTree,
    filter_spec: FilterSpec = True,
    format: AbstractFormat | str = NF4(),
    *,
    axis: Axis | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    unsupported: Unsupported = "skip",
    strict: bool = True,
    example: Any = None,
    stats: "Statistics | Sequential | None" = None,
    method: "AbstractMethod | None" = None,
) -> PyTree:
    """Quantizes the weights of a model, which is then used as before.

    !!! Example

        ```python
        model = eqx.nn.MLP(784, 10, 512, depth=2, key=key)
        model = eqquant.tree_quantize(model)
        jax.vmap(model)(x)
        ```

    **Arguments:**

    - `model`: any PyTree. A skeleton of `jax.ShapeDtypeStruct`s, as made by
        `eqx.filter_eval_shape`, becomes the skeleton of the quantized model. A function
        made by `eqx.filter_jit` of a module is quantized too.
    - `filter_spec`: what to quantize. One of

        - omitted: every known weight of a matrix product. These are the weights of the
            layers of `eqx.nn`, those that [`eqquant.register_owner`][] registered, and
            matrices in plain dicts, lists and tuples outside of any module.
        - a format or its name: the same weights, in this format.
        - a PyTree that is a prefix of `model`, as for `eqx.partition`, whose leaves are
            formats, names of formats, booleans (`True` means `format`), `None`, or
            functions from a leaf of `model` to one of these.
        - [`eqquant.Rules`][], which select leaves by their paths.

        An explicit choice for one leaf (by its place in a prefix, by a rule, or by a
        function that returns a format) overrides `min_size`, `embeddings` and unknown
        owners.

        Vectors, biases and the parameters of norms are never quantized.
    - `format`: what `True` means in `filter_spec`.
    - `axis`: the axis that matrix products contract. `"auto"` depends on the module
        that owns each array: -1 in `eqx.nn.Linear`, which computes `weight @ x`, and -2
        for arrays outside of any module, of `x @ weight`.
    - `min_size`: arrays with fewer elements are left as they are.
    - `embeddings`: whether to quantize `eqx.nn.Embedding`s too.
    - `unsupported`: what to do with layers that pass their weights to functions which
        need dense arrays: convolutions, `WeightNorm`, `SpectralNorm`, and modules of an
        unknown class, or whose `__call__` overrides that of a known class.

        - `"skip"` leaves their weights as they are.
        - `"on_call"` quantizes them, and runs the call of each such layer through
            [`eqquant.implicit`][]. So does each module around a quantized weight that
            is not Equinox's own, since it may read the weight itself, as in
            `jax.lax.ragged_dot(x, self.experts.weight, sizes)`. All stay instances of
            their classes.
        - `"error"` raises an error for a convolution.
    - `strict`: whether a rule that matches no leaf is an error.
    - `example`: arguments that the model may be called with: a tuple, or a single one
        that is not a tuple. Or `(fn, args)`, where `fn(model, *args)` uses the model.
        Arrays may be `jax.ShapeDtypeStruct`s. The call is traced, and not run. It tells
        which arrays inputs are multiplied with and along which axes, so that weights of
        layers of any class are quantized, also of convolutions and of layers that make
        their weight of an array first, such as `WeightNorm`. Where a quantized weight
        is passed to a function that takes ordinary arrays only, the smallest module
        around it runs as by [`eqquant.implicit`][], whatever `unsupported` is.

        ```python
        eqquant.tree_quantize(model, example=x)
        eqquant.tree_quantize(model, example=(lambda m, x: jax.vmap(m)(x), (xs,)))
        ```
    - `stats`: what the weights are multiplied with, from [`eqquant.calibrate`][]. Or
        [`eqquant.Sequential`][], which finds this out while it quantizes one weight
        after another.
    - `method`: how numbers are rounded: [`eqquant.GPTQ`][], [`eqquant.AWQ`][],
        [`eqquant.ScaleSearch`][] or [`eqquant.HQQ`][]. By default to nearest, and by
        `GPTQ()` if there are `stats`. Weights that `stats` does not know are rounded by
        `ScaleSearch()`, with a warning, if the method needs statistics. Of several
        formats, one that has no scales to choose is rounded to nearest, with a warning.
        Skeletons have nothing to round.

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        eqquant.tree_quantize(model, "int4", stats=stats, method=eqquant.GPTQ())
        ```

    **Returns:**

    `model`, with a [`eqquant.QuantizedArray`][] in place of each array that was
    quantized. Arrays that are quantized already stay as they are.
    [`eqquant.report`][] lists all arrays, and why some are not quantized.

    **Raises:**

    A `ValueError` if a weight is not finite, if a rule matches no leaf, or for an
    unsupported layer; with `example`, for a weight that the call of the quantized model
    could not take; with `stats` or `method`, for statistics of another model, and if
    the method cannot round to any of the formats. Warns if it cannot round to one of
    several; if less than half of the model's matrices are quantized because their use
    is unknown or not supported; and if `stats` are of too few rows.
    """
    model = opened(model)
    called = None if example is None else Example(example)
    decisions = decide(
        model,
        filter_spec,
        format,
        axis,
        min_size,
        embeddings,
        unsupported,
        strict,
        example=called,
    )
    if filter_spec is True or isinstance(filter_spec, AbstractFormat | str):
        _warn_of_little(model, decisions, example is not None)
    leaves = []
    callers = {id(module): False for d in decisions for module in d.on_call}
    if called is not None:
        given = [decision.leaf for decision in decisions]
        callers = modules_on_call(model, given, _skeletons(decisions), callers, called)
    if is_sequential(stats):
        solve = rounding_in_sequence(model, decisions, stats, method)
    else:
        decisions, stats = folded(decisions, stats, method)
        solve = rounding(decisions, stats, method)
    quantize_once = once_per_array(ft.partial(_quantize, solve))
    for decision in _progress(decisions):
        leaf, info = decision.leaf, decision.info
        if info is not None and decision.format is not None:
            try:
                leaf = quantize_once(leaf, decision.format, info.axis)
            except ValueError as e:
                raise ValueError(f"Could not quantize `{info.path}`: {e}") from e
        leaves.append(leaf)
    return closed(rebuilt(model, leaves, put_on_call(callers)))


def _skeletons(decisions):
    # What takes the place of each leaf that is quantized, and where that is.
    skeletons = {}
    for i, decision in enumerate(decisions):
        leaf, info = decision.leaf, decision.info
        if info is not None and decision.format is not None:
            struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            q = _skeleton(struct, decision.format, info.axis)
            skeletons[i] = q, info.path, info.ancestors
    return skeletons


def tree_dequantize(model: PyTree) -> PyTree:
    """Replaces each quantized array of a model by a dense one. Skeletons become
    skeletons, and `None` replaces a quantized array whose stored arrays were filtered
    out."""
    model = opened(model)
    leaves = map(_dense, jtu.tree_leaves(model, is_leaf=is_quantized))
    undo = lambda node, new: not_on_call(new) if is_on_call(node) else new
    return closed(rebuilt(model, leaves, undo))


def _dense(x):
    if not isinstance(x, QuantizedArray):
        return x
    stored = jtu.tree_leaves(x.stored)
    if any(isinstance(a, jax.ShapeDtypeStruct) for a in stored):
        return jax.ShapeDtypeStruct(x.shape, x.dtype)
    return x.dequantize() if stored else None


def trainable_spec(model: PyTree) -> PyTree[bool]:
    """The leaves of a model that train, as a filter for `eqx.partition`: true for
    floating-point arrays, and false for quantized ones and everything else."""
    return jtu.tree_map(_is_trained, model, is_leaf=is_quantized)


def _is_trained(x):
    if isinstance(x, jax.ShapeDtypeStruct):
        return jnp.issubdtype(x.dtype, jnp.inexact)
    return eqx.is_inexact_array(x)


def _quantize(solve, leaf, format, axis):
    skeleton = isinstance(leaf, jax.ShapeDtypeStruct)
    return (_skeleton if skeleton else solve)(leaf, format, axis)


def _skeleton(leaf, format, axis):
    q = jax.eval_shape(lambda w: quantize(w, format, axis=axis), leaf)
    if not isinstance(leaf.sharding, NamedSharding):
        return q
    # A struct has nothing to place, so its sharding is only declared.
    spec = full_spec(leaf.sharding.spec, q.ndim)
    return dataclasses.replace(q, sharding=leaf.sharding.update(spec=spec))


def _warn_of_little(model, decisions, traced):
    if callable(model) and jtu.all_leaves([model]):
        warnings.warn(
            f"Nothing is quantized: `model` is a function of type "
            f"{type(model).__name__}, whose arrays cannot be seen. Quantize the module "
            "that it was made from.",
            stacklevel=3,
        )
        return
    size = lambda some: sum(math.prod(d.info.shape) for d in some)
    arrays = [d for d in decisions if d.info is not None]
    left = [d for d in arrays if d.skip is not None and d.skip.kind in _left]
    done = [d for d in arrays if d.skip is None or d.skip.kind == "quantized"]
    if size(left) <= size(done):
        return
    if done:
        share = size(done) / (size(done) + size(left))
        start = f"Only {share:.0%} of the numbers in matrices are quantized."
    else:
        start = "Nothing is quantized."
    lines = [f"\n- `{d.info.path}`: {d.skip.reason}. {d.skip.hint}." for d in left]
    more = f"\n- and {len(lines) - 3} more." if len(lines) > 3 else ""
    way = ":" if traced else ". Pass `example=`, the arguments of a call, to take them:"
    warnings.warn(
        f"{start} How the model uses these matrices is not known, or their layers need "
        f"dense arrays{way}{''.join(lines[:3])}{more}",
        stacklevel=3,
    )


_left = ("unknown owner", "convolution", "reparametrised")


def _progress(decisions: Sequence[Decision]) -> Iterator[Decision]:
    """Iterates, with a progress bar once that has taken two seconds."""
    sizes = [math.prod(d.info.shape) if d.info and d.format else 0 for d in decisions]
    start, done = time.monotonic(), 0
    bar = task = None
    for decision, size in zip(decisions, sizes):
        yield decision
        done += size
        if bar is None and time.monotonic() - start > 2:
            bar = _bar()
            task = bar.add_task("Quantizing", total=sum(sizes))
            bar.start()
        if bar is not None and task is not None:
            bar.update(task, completed=done)
    if bar is not None:
        bar.stop()


def _bar():
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
