from typing import Any, Literal, TYPE_CHECKING

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import is_quantized, QuantizedArray
from .._product import Axis
from ..formats import AbstractFormat, NF4
from ._jitted import closed, opened
from ._on_call import is_on_call, not_on_call, rebuilt
from ._plan import plan
from ._request import FilterSpec, Request, Unsupported
from ._warnings import warn_of_guesses


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
    """Quantizes the weights of a model. The result is used like the model.

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

        - omitted: every known weight of a matrix product: the weights of `eqx.nn`
            layers, fields registered by [`eqquant.register_owner`][], and matrices in
            plain dicts, lists and tuples outside of any module.
        - a format or its name: the same weights, in this format.
        - a PyTree that is a prefix of `model`, as for `eqx.partition`, whose leaves are
            formats, names of formats, booleans (`True` means `format`), `None`, or
            functions from a leaf of `model` to one of these.
        - [`eqquant.Rules`][], which select leaves by their paths.

        An explicit choice for one leaf (by its place in a prefix, by a rule, or by a
        function that returns a format) overrides `min_size`, `embeddings` and unknown
        owners.

        Vectors, biases, states, and the parameters of norms and of activations are
        never quantized.

    - `format`: what `True` means in `filter_spec`.
    - `axis`: the axis that matrix products contract. `"auto"` depends on the module
        that owns the array: -1 in `eqx.nn.Linear`, which computes `weight @ x`, and -2
        outside of any module, for `x @ weight`. The latter is a guess. A warning lists
        arrays for which it may be wrong: those with more than two axes, or with few
        numbers along the axis. Pass an `example` to find the axes by tracing.
    - `min_size`: arrays with fewer elements are left as they are.
    - `embeddings`: whether to quantize `eqx.nn.Embedding`s too, and arrays of which an
        `example` only looks up rows.
    - `unsupported`: what to do with layers that pass their weights to functions which
        need dense arrays: convolutions, `WeightNorm` and `SpectralNorm`.

        - `"skip"` leaves their weights as they are.
        - `"on_call"` quantizes them, and runs the call of each such layer through
            [`eqquant.implicit`][]. Modules around a quantized weight run so, too,
            unless they are Equinox's own: they may read the weight themselves, as in
            `jax.lax.ragged_dot(x, self.experts.weight, sizes)`. All stay instances of
            their classes. (This does not find the weights of unknown classes: pass
            `example`, name them by a rule, or register them.)
        - `"error"` raises an error for a convolution.

    - `strict`: whether a rule that matches no leaf is an error, and also a rule, or a
        format at a place of a prefix, that selects no array that can be quantized, such
        as the filter of a convolution. If false, the latter is a warning. (The rule
        `"*"` selects all weights that can be quantized, so it is exempt.)
    - `example`: arguments that the model may be called with: a tuple, or a single one
        that is not a tuple. Or `(fn, args)`, where `fn(model, *args)` uses the model.
        Arrays may be `jax.ShapeDtypeStruct`s. The call is traced, and not run. The
        trace shows which arrays are multiplied with inputs and along which axes, so
        weights of any class of layers are quantized, including convolutions and layers
        such as `WeightNorm` that compute their weight from an array. If a quantized
        weight is passed to a function that needs dense arrays, the smallest module
        around the call runs through [`eqquant.implicit`][].

        ```python
        eqquant.tree_quantize(model, example=x)
        eqquant.tree_quantize(model, example=(lambda m, x: jax.vmap(m)(x), (xs,)))
        ```

    - `stats`: statistics of the inputs of the weights, from [`eqquant.calibrate`][]. Or
        [`eqquant.Sequential`][], which takes them while it quantizes one weight after
        another.
    - `method`: how numbers are rounded: [`eqquant.GPTQ`][], [`eqquant.AWQ`][],
        [`eqquant.ScaleSearch`][] or [`eqquant.HQQ`][]. The default is `GPTQ()` if there
        are `stats`, and rounding to nearest otherwise. If the method needs statistics,
        weights without any are rounded by `ScaleSearch()`, with a warning. If only some
        formats have scales to choose, the others are rounded to nearest, with a
        warning. Skeletons are not rounded.

        ```python
        stats = eqquant.calibrate(fn, model, batches)
        eqquant.tree_quantize(model, "int4", stats=stats, method=eqquant.GPTQ())
        ```

    **Returns:**

    `model`, with a [`eqquant.QuantizedArray`][] in place of each array that was
    quantized. Arrays that are quantized already stay as they are. (To round them to
    another format, pass `eqquant.tree_dequantize(model)`.)
    [`eqquant.report`][] lists all arrays, and why some are not quantized.

    All arrays are computed when this returns. A terminal shows a progress bar, and the
    total time if it exceeds a minute.

    **Raises:**

    A `ValueError` if a weight is not finite; if a rule matches no leaf, or none that
    can be quantized; for an unsupported layer; with `example`, for a weight that the
    call of the quantized model cannot take; with `stats` or `method`, for statistics of
    another model, or if the method applies to none of the formats. Warns if the method
    does not apply to one of several formats; if less than half of the model's matrices
    are quantized because their use is unknown or not supported; if the axis of an array
    is a doubtful guess; and if `stats` are from too few rows.
    """
    request = Request(
        opened(model),
        filter_spec,
        format,
        axis,
        min_size,
        embeddings,
        unsupported,
        strict,
        example,
    )
    planned = plan(request)
    if stats is None:
        warn_of_guesses(request, planned.decisions)
    return closed(planned.rebuilt(planned.rounded(stats, method)))


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
