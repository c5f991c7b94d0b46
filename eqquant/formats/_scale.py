from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, UInt

from ._check import as_dtype


scale_dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)


def scale_dtype_field(default: Any = jnp.float32) -> Any:
    """Returns the field `scale_dtype` of a format."""
    return eqx.field(default=default, static=True, converter=_as_scale_dtype)


def _as_scale_dtype(dtype: Any) -> np.dtype:
    wanted = "`scale_dtype` should be float32, bfloat16 or float16. Got"
    converted = as_dtype(dtype, wanted)
    if converted not in [jnp.dtype(d) for d in scale_dtypes]:
        raise ValueError(f"{wanted} {converted.name}.")
    return converted


def to_bits(scale: Float[Array, "*s"], dtype: np.dtype) -> UInt[Array, "*s"]:
    """Converts a scale to the bits of a float: an integer array, which no optimizer
    trains.

    The scale is rounded to the nearest number of the dtype. A float16 scale is rounded
    up if it would otherwise shrink by a thousandth, as subnormal scales may: the
    largest number of a block should not exceed the last code. So only zero becomes
    zero. Scales that overflow the dtype become NaN.
    """
    if dtype == jnp.float16:
        scale = _in_float16(scale, least=0.999)
    else:
        # XLA would flush subnormal numbers of these dtypes.
        tiny = jnp.finfo(dtype).tiny.astype(jnp.float32)
        scale = jnp.where(jnp.abs(scale) < tiny, jnp.sign(scale) * tiny, scale)
        scale = lax.reduce_precision(scale, 8, 7) if dtype.itemsize == 2 else scale
    scale = or_nan(jnp.isfinite(scale), scale)
    bits = jnp.uint32 if dtype.itemsize == 4 else jnp.uint16
    return lax.bitcast_convert_type(scale.astype(dtype), bits)


def nearest_scale(scale: Float[Array, "*s"], dtype: np.dtype) -> Float[Array, "*s"]:
    """Rounds a scale before `to_bits` to the nearest number of the dtype, up or down.
    This is for means and minima, which no number of the block has to stay below."""
    return _in_float16(scale, least=0) if dtype == jnp.float16 else scale


def exact_or(
    low: Float[Array, "*s"],
    high: Float[Array, "*s"],
    mean: Float[Array, "*s"],
    dtype: np.dtype,
) -> Float[Array, "*s"]:
    """Returns the scale of blocks on a grid of a number and its negative (and zero):
    this number, if all numbers of a block have the same absolute value, from `low` to
    `high`. Otherwise the mean. Both are rounded by `nearest_scale`."""
    return nearest_scale(jnp.where(low == high, high, mean), dtype)


def _in_float16(x, least):
    # By arithmetic, since XLA may remove a pair of casts. The float16 numbers with the
    # exponent of `x` are whole multiples of this power of two:
    exponent = lax.bitcast_convert_type(jnp.abs(x), jnp.uint32) >> np.uint32(23)
    exponent = jnp.clip(exponent, 127 - 14, 127 + 16) - np.uint32(10)
    unit = lax.bitcast_convert_type(exponent << np.uint32(23), jnp.float32)
    exact = jnp.abs(x) / unit
    whole = jnp.round(exact)
    whole = jnp.where(whole < least * exact, whole + 1, whole) * unit
    return jnp.sign(x) * jnp.where(whole > 65504, jnp.inf, whole)


def from_bits(bits: UInt[Array, "*s"], dtype: np.dtype) -> Float[Array, "*s"]:
    """The inverse of `to_bits`, in float32."""
    return lax.bitcast_convert_type(bits, dtype).astype(jnp.float32)


def poison(
    scale: Float[Array, "..."], blocks: Float[Array, "*b g s"]
) -> Float[Array, "..."]:
    """Makes each scale NaN whose block has a NaN, an infinity, or a number so close to
    the largest float32 that it may overflow when the scale is rounded.

    (A maximum would not detect NaNs: on CPU, XLA's maximum ignores them.)
    """
    shared = tuple(i for i in range(-scale.ndim, 0) if scale.shape[i] == 1)
    return or_nan(all_within(blocks, _most, shared), scale)


def or_nan(known: Bool[Array, "..."], x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Returns `x` where it is known, and NaN elsewhere.

    The NaN is made from bits: outside of `jit`, `jax.debug_nans` reports every array
    with a NaN, even a constant.
    """
    kind = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = jnp.where(known, np.zeros((), kind), _nan(x.dtype))
    return jnp.where(known, x, lax.bitcast_convert_type(bits, x.dtype))


def _nan(dtype):
    # The bits of NaN.
    return np.asarray(np.nan, dtype).view(f"uint{8 * dtype.itemsize}")


def all_within(
    x: Float[Array, "..."], most: float | np.floating, axis: int | tuple[int, ...] = -1
) -> Bool[Array, "..."]:
    """Whether no absolute value along some axes, which are kept with size one, is
    larger than `most`, or NaN."""
    # (Not by the maximum of the bits, in whose order NaN is the largest: on some
    # processors, XLA would write the bits to memory first.)
    return jnp.all(jnp.abs(x) <= most, axis, keepdims=True)


# (Rounding to bfloat16 changes a scale by up to one part in 256.)
_most = np.float32(0.99) * np.finfo(np.float32).max


def reciprocal(scale: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Returns `1 / scale`, and zero for a block of zeros."""
    return jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))


def step(
    low: Float[Array, "*s"], high: Float[Array, "*s"], steps: int
) -> Float[Array, "*s"]:
    """Returns the width of each of `steps` equal steps from `low` to `high`."""
    # Halves, since the difference may overflow.
    return divided(high / 2 - low / 2, steps / 2)


def held(
    bits: UInt[Array, "*s"], dtype: np.dtype, ends: Sequence[Float[Array, "*s"]]
) -> UInt[Array, "*s"]:
    """Makes each scale NaN with which one of the extreme numbers `ends` overflows."""
    for end in ends:
        bits = jnp.where(jnp.isfinite(end), bits, _nan(dtype))
    return bits


def in_units(x: Float[Array, "*s"], scale: Float[Array, "..."]) -> Float[Array, "*s"]:
    """Returns `x` times the reciprocal of a scale, and zero for a block of zeros."""
    # The reciprocal of a very large scale would be subnormal, and flushed to zero.
    down = jnp.where(scale > 2.0**64, np.float32(2.0**-64), np.float32(1))
    return (x * down) * reciprocal(scale * down)


def divided(
    x: Float[Array, "*s"], y: Float[Array, "..."] | float | int
) -> Float[Array, "*s"]:
    """Returns `x / y`, correctly rounded."""
    # XLA would multiply by the reciprocal of a constant or broadcast divisor. A select
    # hides that it is constant.
    return x / jnp.where(jnp.isnan(x), x, y)
