import functools as ft
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int, UInt8

from .._array import quantize, QuantizedArray
from .._product import placed
from ..formats import AbstractFormat


class Kept(eqx.Module):
    """An array in fewer bits, in which each row (along the last axis) may have numbers
    of two ranges that are far apart, such as attention scores and -1e9 for masked
    scores. The large numbers are then divided by a power of two, so that they do not
    take the precision of the others that share a scale.

    - `near`: the numbers after this division.
    - `far`: a bit for each number: whether it was divided.
    - `power`: the exponent of the power of two, for each row. Zero if all numbers are
        in one range.
        range.
    """

    near: QuantizedArray
    far: UInt8[Array, "*b _"]
    power: Int[Array, "*b 1"]
    dtype: Any = eqx.field(static=True)

    def dense(self) -> Float[Array, "*b k"]:
        """Returns the stored numbers. Infinities have become the largest number of the
        dtype."""
        most = float(jnp.finfo(self.dtype).max)

        def joined(near, far, power):
            x = near.dequantize()
            x = jnp.where(_unpacked(far, x.shape[-1]), _scaled(x, power), x)
            return jnp.clip(x, -most, most)

        one = lambda near, far, power: near.dequantize()
        given = self.near, self.far, self.power.astype(jnp.int32)
        return lax.cond(
            _any_above(self.power, np.int16(0)), joined, one, *given
        ).astype(self.dtype)


# (Within `jit`, numbers that are not finite are no error.)
@ft.partial(jax.jit, static_argnums=1)
def keep(x: Float[Array, "*b k"], format: AbstractFormat) -> Kept:
    """Rounds an array to a format, with blocks along the last axis."""
    wide = lax.stop_gradient(x).astype(jnp.float32)

    def two(x):
        x, far, power = _apart(x)
        return quantize(x, format, axis=-1), _packed(far), power.astype(jnp.int16)

    _, *likes = jax.eval_shape(two, wide)

    def one(x):
        return quantize(x, format, axis=-1), *map(_zeros, likes)

    # Finding ranges takes time and memory, so they are looked for only if a number is
    # as large as one that may stand for infinity.
    large = _any_above(jnp.abs(wide), np.float32(256))
    near, far, power = lax.cond(large, two, one, wide)
    return Kept(near, far, power, x.dtype)


@jax.custom_batching.custom_vmap
def _any_above(x, least):
    return ~jnp.all(x <= least)


# (This rule makes `vmap` compute only one branch, too.)
@_any_above.def_vmap
def _(size, is_mapped, x, least):
    return _any_above(x, least), False


def _zeros(like):
    zeros = jnp.zeros(like.shape, like.dtype)
    return zeros if like.sharding is None else placed(zeros, like.sharding)


# Two ranges have no numbers between them over a factor of 2**6. (In a block of 8-bit
# integers, the smaller numbers would have one or two codes at most.)
_ratio = np.int32(6 << 23)
_huge = np.float32(1e30).view(np.int32)
_most = np.finfo(np.float32).max


def _apart(x):
    """Returns an array whose rows have numbers of one range each, which numbers were
    scaled for this, and the power of two for each row."""
    x = jnp.clip(x, -_most, _most)
    # Positive floats are ordered like their bits, and a factor of two is a one in the
    # exponent. (XLA writes no array to memory before it reduces integers.)
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    top = jnp.max(bits, -1, keepdims=True, initial=0)
    far = bits > top - _ratio
    low = jnp.max(jnp.where(far, 0, bits), -1, keepdims=True, initial=0)
    # (Computed by another formula than `far`, so that this waits, and reuses its
    # memory.)
    most = np.iinfo(np.int32).max
    least = jnp.where(bits > low, bits, most)
    least = jnp.min(least, -1, keepdims=True, initial=most)
    # (Zeros lose no precision, except in a format with one scale for all rows.)
    apart = (least > low + _ratio) & ((low > 0) | (top > _huge))
    one = np.float32(1).view(np.int32)
    power = (top >> 23) - (jnp.where(low > 0, low, one) >> 23) + 1
    power = jnp.where(apart, jnp.clip(power, 1, 250), 0)
    far &= apart
    return jnp.where(far, _scaled(x, -power), x), far, power


def _scaled(x, power):
    """Returns exactly `x * 2**power`."""
    half = power // 2
    for part in (half, power - half):
        x = x * lax.bitcast_convert_type((part + 127) << 23, jnp.float32)
    return x


def _packed(far: Bool[Array, "*b k"]) -> UInt8[Array, "*b _"]:
    far = far.astype(jnp.uint8)
    if any(jax.typeof(far).sharding.spec[-1:]):
        return far
    far = jnp.pad(far, [(0, 0)] * (far.ndim - 1) + [(0, -far.shape[-1] % 8)])
    parts = [far[..., i::8] << np.uint8(i) for i in range(8)]
    return ft.reduce(jnp.bitwise_or, parts)


def _unpacked(bits: UInt8[Array, "*b _"], k: int) -> Bool[Array, "*b k"]:
    if bits.shape[-1] == k:
        return bits > 0
    shifts = np.arange(8, dtype=np.uint8).reshape((1,) * bits.ndim + (8,))
    each = (bits[..., None] >> shifts) & np.uint8(1)
    return each.reshape(*bits.shape[:-1], -1)[..., :k] > 0
