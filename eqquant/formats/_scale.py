from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt


scale_dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)


def as_scale_dtype(dtype: Any) -> np.dtype:
    """Converts the argument `scale_dtype` of a format."""
    wanted = "`scale_dtype` should be float32, bfloat16 or float16. Got"
    try:
        converted = jnp.dtype(dtype)
    except TypeError as e:
        raise TypeError(f"{wanted} {dtype!r}.") from e
    if converted not in [jnp.dtype(d) for d in scale_dtypes]:
        raise ValueError(f"{wanted} {converted.name}.")
    return converted


def to_bits(scale: Float[Array, "*s"], dtype: np.dtype) -> UInt[Array, "*s"]:
    """A scale as the bits of a float. Not an inexact array, so nothing trains it."""
    # Other than zero, a scale is never subnormal: those are flushed, or have few bits.
    tiny = jnp.finfo(dtype).tiny.astype(jnp.float32)
    scale = jnp.where(jnp.abs(scale) < tiny, jnp.sign(scale) * tiny, scale)
    bits = jnp.uint32 if dtype.itemsize == 4 else jnp.uint16
    return lax.bitcast_convert_type(scale.astype(dtype), bits)


def from_bits(bits: UInt[Array, "*s"], dtype: np.dtype) -> Float[Array, "*s"]:
    """The inverse of `to_bits`, in float32."""
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def poison(
    scale: Float[Array, "..."], blocks: Float[Array, "*b g s"]
) -> Float[Array, "..."]:
    """Makes NaN each scale whose block has a NaN or an infinity.

    (A maximum cannot be trusted to: on CPU, XLA's drops NaNs.)
    """
    shared = [i for i in range(-scale.ndim, 0) if scale.shape[i] == 1]
    finite = jnp.all(jnp.isfinite(blocks), axis=shared, keepdims=True)
    return jnp.where(finite, scale, jnp.nan)


def reciprocal(scale: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """`1 / scale`, and zero for a block of zeros."""
    return jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))


def divided(
    x: Float[Array, "*s"], y: Float[Array, "..."] | float | int
) -> Float[Array, "*s"]:
    """`x / y` to the last bit."""
    # Of a constant, and of what is broadcast, XLA would take the reciprocal. So that it
    # is neither:
    return x / jnp.where(jnp.isnan(x), x, y)
