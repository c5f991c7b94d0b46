import functools as ft
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from ...formats import AbstractFormat
from .._stochastic import Stochastic
from .._straight_through import estimate
from ._delayed import Delayed
from ._operand import rounded
from ._product import Roundings


def round_cotangent(
    x: Float[Array, "..."],
    rounding: AbstractFormat | Stochastic,
    kept: Sequence[int],
) -> Float[Array, "..."]:
    """Returns `x`. Its cotangent is rounded, with scales that do not extend over the
    axes `kept`, nor over axes of `vmap`."""
    return round_cotangent_p.bind(x, rounding=rounding, kept=tuple(kept))


def rounded_over(
    x: Float[Array, "..."],
    rounding: AbstractFormat | Stochastic,
    kept: Sequence[int],
) -> Float[Array, "..."]:
    """Rounds an array, in its dtype. Blocks lie along all axes but `kept`, in their
    order. The derivative is straight-through."""
    order = [*kept, *[i for i in range(x.ndim) if i not in kept]]
    moved = jnp.transpose(x, order)
    rows = [x.shape[i] for i in kept]
    flat = moved.reshape(*rows, math.prod(moved.shape[len(rows) :]))
    new = rounded(flat, rounding).astype(x.dtype).reshape(moved.shape)
    return estimate(jnp.transpose(new, sorted(range(x.ndim), key=order.__getitem__)), x)


# A primitive, for the same reason as `linear_p`.
round_cotangent_p = Primitive("round_cotangent")
round_cotangent_p.def_impl(lambda x, **params: x)
round_cotangent_p.def_abstract_eval(lambda x, **params: x)
mlir.register_lowering(round_cotangent_p, lambda ctx, x, **params: [x])


def _transpose(ct, x, *, rounding, kept):
    del x
    return [ct if isinstance(ct, ad.Zero) else rounded_over(ct, rounding, kept)]


ad.deflinear2(round_cotangent_p, _transpose)


def _batch(operands, axes, *, rounding, kept):
    ((x,), (axis,)) = operands, axes
    kept = (axis, *[i + (i >= axis) for i in kept])
    return round_cotangent(x, rounding, kept), axis


batching.primitive_batchers[round_cotangent_p] = _batch


class Convolution:
    """`lax.conv_general_dilated` with all parameters as in a jaxpr, without operands.
    It is a value."""

    def __init__(self, params: dict[str, Any]):
        self.params = params
        self._key = tuple(sorted(params.items()))

    def __hash__(self):
        return hash(self._key)

    def __eq__(self, other):
        return isinstance(other, Convolution) and self._key == other._key

    def __call__(self, x: Array, w: Array) -> Array:
        params = {**self.params, "preferred_element_type": x.dtype}
        return lax.conv_general_dilated(x, w, **params)


def rounded_conv(
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    conv: Convolution,
    roundings: Roundings,
) -> Float[Array, "..."]:
    """Convolves rounded operands, in the dtype of `x`. Inputs and cotangents have a
    scale for each sample, and filters for each output channel. The derivatives are
    those of the rounded convolution, straight through the rounding. Raises a
    `ValueError` if scales are delayed."""
    numbers, forward = conv.params["dimension_numbers"], roundings.forward
    if isinstance(forward, Delayed) or any(roundings.histories):
        raise ValueError(
            "Convolutions have scales of their own for each sample, so the formats of "
            f"a filter should not be `Delayed`. Got {roundings}: leave it out by "
            "`filter_spec`, or prepare it by a call of its own."
        )
    rounded = lambda a, spec: rounded_over(lax.stop_gradient(a), forward, spec[:1])
    w = w.astype(x.dtype)
    return _conv(
        x,
        w,
        rounded(x, numbers.lhs_spec),
        rounded(w, numbers.rhs_spec),
        conv,
        roundings,
    )


@ft.partial(jax.custom_jvp, nondiff_argnums=(4, 5))
def _conv(x, w, inputs, filters, conv, roundings):
    del x, w, roundings
    return conv(inputs, filters)


@ft.partial(_conv.defjvp, symbolic_zeros=True)
def _jvp(conv, roundings, primals, tangents):
    _, _, inputs, filters = primals
    dx, dw, _, _ = tangents
    sample = conv.params["dimension_numbers"].out_spec[:1]
    y = _conv(*primals, conv, roundings)
    dy = [
        _linear(conv, a, b, rounding, sample)
        for a, b, rounding in (
            (dx, filters, roundings.to_input),
            (inputs, dw, roundings.to_weight),
        )
        if not (isinstance(a, SymbolicZero) or isinstance(b, SymbolicZero))
    ]
    return y, sum(dy[1:], dy[0])


def _linear(conv, a, b, rounding, sample):
    if isinstance(rounding, np.dtype):
        # The casts give its transpose the same dtype.
        return conv(a.astype(rounding), b.astype(rounding)).astype(a.dtype)
    y = conv(a, b)
    return y if rounding is None else round_cotangent(y, rounding, sample)
