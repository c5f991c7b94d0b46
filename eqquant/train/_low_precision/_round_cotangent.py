import math
from collections.abc import Sequence

import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from ...formats import AbstractFormat
from .._stochastic import Stochastic
from .._straight_through import estimate
from ._operand import rounded


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
