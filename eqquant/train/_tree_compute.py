import dataclasses
from typing import Any, Literal

import jax.tree_util as jtu
from jaxtyping import PyTree

from .._array import AbstractArrayLike, is_quantized
from .._product import as_tuple, Axis
from .._tree import (
    closed,
    Decision,
    FilterSpec,
    is_on_call,
    not_on_call,
    opened,
    plan,
    rebuilt,
    Request,
    Unsupported,
)
from ..formats import AbstractFormat, Int8
from ._lora import LoRA
from ._low_precision import (
    Backward,
    checked_backward,
    checked_format,
    checked_forward,
    Delayed,
    History,
    is_low_precision,
    LowPrecision,
    plain,
    Roundings,
)


def tree_compute(
    model: PyTree,
    filter_spec: FilterSpec = True,
    forward: AbstractFormat | Delayed | str | None = Int8(),
    *,
    backward: Backward | tuple[Backward, Backward] = None,
    axis: Axis | Literal["auto"] = "auto",
    min_size: int = 1024,
    embeddings: bool = False,
    unsupported: Unsupported = "skip",
    strict: bool = True,
    example: Any = None,
) -> PyTree:
    """Prepares a model for low-precision training: the weights stay floating-point
    arrays that an optimizer updates, and their products are computed in fewer bits. The
    modules and the training loop stay the same.

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
    both in [`eqquant.FP8`][], without `block_size`. Their scales then apply to the
    result: one for each row of the inputs and for each output channel of the weight, or
    one for each operand with `FP8(scale="tensor")`. If a product of the backward pass
    contracts an axis along which the weight or the inputs have scales, these are
    multiplied into the cotangent before it is rounded; so each operand is rounded once
    in a step. In other formats (blocks, [`eqquant.MXFP8`][], [`eqquant.NVFP4`][]), the
    rounded operands are multiplied in the dtype of the inputs. There is one exception:
    in a program compiled for an NVIDIA GPU of compute capability 10.0 or more
    (Blackwell), the forward pass multiplies operands in [`eqquant.MXFP8`][],
    [`eqquant.MXFP4`][] and [`eqquant.NVFP4`][] directly, by `jax.lax.scaled_dot`, if
    blocks are whole and XLA does not have to split the product over devices. (The
    backward pass contracts other axes than those along which blocks lie.)

    Scales are computed from the current array ("current scaling"), or with
    [`eqquant.train.Delayed`][] from earlier steps.

    A product may contract any number of axes, in any order. Convolutions have scales
    for each output channel of the filter, and for each sample of the inputs and the
    cotangents. Their operands are rounded, and then multiplied in the dtype of the
    inputs, so they are not faster.

    For the backward pass, the rounded operands are kept. They have the names
    `"eqquant_weights"` and `"eqquant_inputs"`, for policies of `jax.checkpoint`.

    **Arguments:**

    - `model`, `filter_spec`, `axis`, `min_size`, `embeddings`, `unsupported`, `strict`,
        `example`: as in [`eqquant.tree_quantize`][], which selects the same leaves and
        modules. So convolutions, `jnp.einsum`s and layers of other classes compute in
        fewer bits with an `example`, or with `unsupported="on_call"`.
    - `forward`: the format of the weights and inputs, its name, or a format with
        [`eqquant.train.Delayed`][] scales. `None` undoes this function: it restores the
        weights.
    - `backward`: the rounding of cotangents: a format; stochastic rounding to a format,
        with [`eqquant.train.Stochastic`][]; a format with [`eqquant.train.Delayed`][]
        scales; a dtype, such as `jnp.bfloat16`, to which the other operand is rounded
        as well; or `None` for no rounding. A pair is for the gradients of the inputs,
        and of the weights.

    **Returns:**

    `model`, with a [`eqquant.train.LowPrecision`][] in place of each selected array. In
    a weight with an adapter it replaces the base: the adapter itself trains in its own
    dtype. Quantized arrays are unchanged, with or without an adapter. (Their products
    need not be in floating point: see `activation` of [`eqquant.quantize`][].)

    **Raises:**

    The errors of [`eqquant.tree_quantize`][], except that weights need not be finite. A
    `ValueError` if a format does not round, or if `backward` is a tuple of another
    length, a dtype of integers, or a pair of different histories.

    ??? cite "Reference"

        Jetfire: Efficient and Accurate Transformer Pretraining with INT8 Data Flow.
        Xi et al., 2024. (8-bit integers.)

        FP8 Formats for Deep Learning. Micikevicius et al., 2022. (`"e4m3"` forward and
        `"e5m2"` backward.)

        Training and Inference of Large Language Models using 8-bit Floating Point.
        Perez et al., 2023. (Current scaling.)
    """
    model = _undone(opened(model))
    backwards = checked_backward(backward)
    if forward is None:
        return closed(model)
    format, rounding = checked_forward(forward)
    # The decision on the weight under an adapter does not depend on the adapter.
    bare = jtu.tree_map(_base, model, is_leaf=_is_done)
    request = Request(
        bare,
        filter_spec,
        format,
        axis,
        min_size,
        embeddings,
        unsupported,
        strict,
        example,
        _is_done,
    )
    # A rule may choose another format.
    as_given = lambda f: rounding if f == format else f
    low_precision = lambda decision: _low_precision(decision, as_given, backwards)
    planned = plan(request, low_precision)
    new = map(low_precision, planned.decisions)
    given = jtu.tree_leaves(model, is_leaf=_is_done)
    return closed(planned.rebuilt(map(_with_base, given, new)))


def tree_preround(model: PyTree) -> PyTree:
    """Rounds the weights of a model for all later products. Call this at the beginning
    of a loss whose layers run more than once in a step, under `jax.checkpoint` or for
    several parts of a batch, so that the weights are rounded only once.

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

    `model`, in which each [`eqquant.train.LowPrecision`][] also holds its rounded
    weight. This is not updated with the weight: let the optimizer update the original
    model.
    """
    return jtu.tree_map(
        lambda x: x.preround() if is_low_precision(x) else x,
        model,
        is_leaf=is_low_precision,
    )


def _is_done(x: Any) -> bool:
    return isinstance(x, AbstractArrayLike)


def _undone(model):
    """Returns the model as it was before `tree_compute`."""
    leaves = jtu.tree_leaves(model, is_leaf=is_low_precision)
    if not any(map(is_low_precision, leaves)):
        return model

    def undo(node, new):
        if not is_on_call(node):
            return new
        inside = jtu.tree_leaves(node, is_leaf=_is_done)
        is_ours = any(map(is_low_precision, inside))
        return (
            not_on_call(new) if is_ours and not any(map(is_quantized, inside)) else new
        )

    return rebuilt(model, map(plain, leaves), undo, is_low_precision)


def _is_adapted(x: Any) -> bool:
    return isinstance(x, LoRA) and not is_quantized(x.base)


def _base(x):
    return x.base if _is_adapted(x) else x


def _with_base(given, new):
    return dataclasses.replace(given, base=new) if _is_adapted(given) else new


def _low_precision(decision: Decision, as_given, backwards) -> Any:
    if decision.format is None:
        return decision.leaf
    info = decision.info
    assert info is not None
    format = checked_format(f"forward` of `{info.path}", decision.format)
    roundings = Roundings(as_given(format), *backwards)
    history = None
    if any(roundings.histories):
        history = History.empty(_stack(info.shape, info.axis))
    return LowPrecision(decision.leaf, None, info.axis, roundings, history)


def _stack(shape: tuple[int, ...], axis: Axis) -> tuple[int, ...]:
    """Returns the sizes of the axes before those of one layer, which are the contracted
    axes and at least one axis of outputs."""
    axes = as_tuple(axis)
    first = -min(axes)
    own = first + 1 if first == len(axes) else first
    return shape[: max(0, len(shape) - own)]
