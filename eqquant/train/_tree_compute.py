from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import AbstractArrayLike
from .._tree import decide, Decision, FilterSpec
from ..formats import AbstractFormat, as_format, Int8
from ._low_precision import LowPrecision
from ._low_precision_product import Roundings
from ._operand import Rounding
from ._points import as_rounding
from ._stochastic import Stochastic


Backward: TypeAlias = AbstractFormat | Stochastic | str | Any | None


def tree_compute(
    model: PyTree,
    filter_spec: FilterSpec = True,
    forward: AbstractFormat | str | None = Int8(),
    *,
    backward: Backward | tuple[Backward, Backward] = None,
    axis: int | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    strict: bool = True,
) -> PyTree:
    """Prepares a model for low-precision training: the weights stay floating-point
    arrays that an optimizer updates, and the products that they enter are computed in
    fewer bits. The modules and the training loop stay the same.

    In the forward pass, weights and inputs are rounded to the format `forward`; in the
    backward pass, cotangents are rounded to `backward`. The gradients are those of the
    product of the rounded operands, straight through the rounding.

    !!! Example

        ```python
        model = eqx.nn.MLP(64, 10, 128, depth=2, key=key)
        model = eqquant.train.tree_compute(
            model, forward="int8", backward=eqquant.train.Stochastic("int8")
        )
        ```

    Two operands are multiplied as 8-bit numbers if both are in [`eqquant.Int8`][], or
    both in [`eqquant.FP8`][], without `block_size`: their scales (one for each row of
    the inputs, and for each output channel of the weight; or one for each of them, with
    `FP8(scale="tensor")`) then apply to the result. Where a product of the backward
    pass contracts an axis along which the weight or the inputs have scales, these are
    multiplied into the cotangent before it is rounded; so each operand is rounded once
    in a step. In other formats (blocks, [`eqquant.MXFP8`][], [`eqquant.NVFP4`][]), the
    rounded operands are multiplied in the dtype of the inputs. All scales are those of
    the array at hand ("current scaling").

    For the backward pass, the rounded operands are kept. They have the names
    `"eqquant_weights"` and `"eqquant_inputs"`, for policies of `jax.checkpoint`.

    **Arguments:**

    - `model`, `filter_spec`, `axis`, `min_size`, `embeddings`, `strict`: as in
        [`eqquant.tree_quantize`][], which selects the same leaves. Filters of
        convolutions are left as they are.
    - `forward`: the format of the weights and inputs, or its name. `None` undoes this:
        it puts the weights back.
    - `backward`: what cotangents are rounded to: a format; a format at random, as
        [`eqquant.train.Stochastic`][]; a dtype, such as `jnp.bfloat16`, which the other
        operand is rounded to as well; or nothing, with `None`. A pair of these is for
        the gradients of the inputs, and for those of the weights.

    **Returns:**

    `model`, with a [`eqquant.train.LowPrecision`][] in place of each selected array.
    Arrays that are quantized, or that have an adapter, are unchanged. (The frozen
    weight of an adapter need not be one in floating point: see `activation` of
    [`eqquant.tree_quantize`][].)

    **Raises:**

    The errors of [`eqquant.tree_quantize`][], except that weights need not be finite. A
    `ValueError` if a format does not round, if `axis` is neither -1 nor -2, or if
    `backward` is a tuple of another length or a dtype of integers.

    ??? cite "Reference"

        Jetfire: Efficient and Accurate Transformer Pretraining with INT8 Data Flow.
        Xi et al., 2024. (8-bit integers.)

        FP8 Formats for Deep Learning. Micikevicius et al., 2022. (`"e4m3"` forward and
        `"e5m2"` backward.)

        Training and Inference of Large Language Models using 8-bit Floating Point.
        Perez et al., 2023. (Scales of the array at hand.)
    """
    model = jtu.tree_map(_plain, model, is_leaf=_is_low_precision)
    to_input, to_weight = _checked_backward(backward)
    if forward is None:
        return model
    decisions = decide(
        model,
        filter_spec,
        _checked("forward", forward),
        axis,
        min_size,
        embeddings,
        strict=strict,
        is_done=_is_done,
    )
    new = [_low_precision(d, to_input, to_weight) for d in decisions]
    treedef = jtu.tree_structure(model, is_leaf=_is_done)
    return jtu.tree_unflatten(treedef, new)


def tree_preround(model: PyTree) -> PyTree:
    """Rounds the weights of a model for all products that follow. Call this at the
    beginning of a loss whose layers run more than once in a step: under
    `jax.checkpoint`, or for several parts of a batch. Then they need not be rounded
    again.

    Gradients reach the weights as before.

    !!! Example

        ```python
        @eqx.filter_grad
        def gradients(model, x):
            model = eqquant.train.tree_preround(model)
            return jnp.sum(jax.checkpoint(jax.vmap(model))(x) ** 2)
        ```

    **Arguments:**

    - `model`: any PyTree, as from [`eqquant.train.tree_compute`][].

    **Returns:**

    `model`, in which each [`eqquant.train.LowPrecision`][] holds its rounded weight,
    too. That does not follow when the weight is updated: update the model that this
    function was given.
    """
    return jtu.tree_map(
        lambda x: x.preround() if _is_low_precision(x) else x,
        model,
        is_leaf=_is_low_precision,
    )


def _is_low_precision(x: Any) -> bool:
    return isinstance(x, LowPrecision)


def _is_done(x: Any) -> bool:
    return isinstance(x, AbstractArrayLike)


def _plain(x):
    return x.weight if _is_low_precision(x) else x


def _low_precision(decision: Decision, to_input, to_weight) -> Any:
    if decision.format is None:
        return decision.leaf
    info = decision.info
    assert info is not None
    format = _checked(f"forward` of `{info.path}", decision.format)
    if info.axis not in (-1, -2):
        raise ValueError(
            "Low-precision products contract one of the last two axes of a weight. Got "
            f"`axis` {info.axis} for `{info.path}`: exclude it by a rule."
        )
    roundings = Roundings(format, to_input, to_weight)
    return LowPrecision(decision.leaf, None, info.axis, roundings)


def _checked_backward(backward) -> tuple[Rounding, Rounding]:
    pair = backward if isinstance(backward, tuple) else (backward, backward)
    if len(pair) != 2:
        raise ValueError(
            "`backward` should be one rounding, or a pair: for the gradients of the "
            f"inputs and of the weights. Got {len(pair)} of them."
        )
    first, second = (_checked_rounding(one) for one in pair)
    return first, second


def _checked_rounding(rounding) -> Rounding:
    if rounding is None or isinstance(rounding, Stochastic):
        return rounding
    if isinstance(rounding, AbstractFormat | str):
        return _checked("backward", rounding)
    try:
        dtype = jnp.dtype(rounding)
    except TypeError as e:
        raise TypeError(
            "`backward` should be a format, a `Stochastic` one, a dtype, None, or a "
            f"pair of these. Got {rounding!r}."
        ) from e
    if not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise ValueError(
            "`backward` should be a floating-point dtype of 16 bits or more, or a "
            f"format such as `FP8('e5m2')`. Got {dtype.name}."
        )
    return dtype


def _checked(name: str, format: AbstractFormat | str) -> AbstractFormat:
    try:
        return as_rounding(as_format(format))
    except ValueError as e:
        raise ValueError(f"`{name}` should be a format that rounds: {e}") from e
