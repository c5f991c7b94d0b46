"""What GGUF's `K` types have in common: blocks of 256 numbers that consist of small
ones, each with a scale of a few bits, and one with a least number of as many bits."""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from .._bit_fields import BitField, Code
from .._scale import to_bits
from ._base import half, planes
from ._search import best_range, best_scale, rounded, signed_largest


def small_blocks(x: Float[Array, "*b 256"], size: int) -> Float[Array, "*b g s"]:
    return x.reshape(*x.shape[:-1], 256 // size, size)


def large_block(x: Float[Array, "*b g s"]) -> Float[Array, "*b 256"]:
    """The inverse of `small_blocks`."""
    return x.reshape(*x.shape[:-2], 256)


def _flat(x: Float[Array, "*b h g s"]) -> Float[Array, "*b _ s"]:
    *lead, number, few, size = x.shape
    return x.reshape(*lead, number * few, size)


def fit_ranges(
    x: Float[Array, "*b g s"],
    weights: Float[Array, "*b g s"],
    most: int,
    most_scale: int,
    start: float,
    steps: int,
    absolute: bool,
) -> tuple[
    UInt8[Array, "*b 2"],
    UInt8[Array, "*b 2"],
    UInt8[Array, "*b g"],
    UInt8[Array, "*b g"],
    UInt8[Array, "*b 256"],
]:
    """The two scales of large blocks, those of the small ones and of how far below zero
    they begin, up to `most_scale`, and the codes, up to `most`."""
    found = best_range(_flat(x), _flat(weights), most, start, steps, absolute)
    found = [a.reshape(*x.shape[:-1], 1) for a in found]
    wholes, parts = [], []
    for scales in found:
        scales = scales[..., 0]
        whole = _whole(jnp.max(scales, axis=-1, keepdims=True) / most_scale)
        wholes.append(whole)
        parts.append(rounded(scales, half(whole), 0, most_scale))
    few, few_below = parts
    # Where a step is too small for a float16, the numbers become zeros.
    few_below = jnp.where(few == 0, 0, few_below)
    scale, below = half(wholes[0]) * few, half(wholes[1]) * few_below
    codes = large_block(rounded(x + below[..., None], scale[..., None], 0, most))
    few, few_below, codes = (a.astype(jnp.uint8) for a in (few, few_below, codes))
    return *wholes, few, few_below, codes


def from_ranges(
    step: UInt8[Array, "*b 2"],
    low: UInt8[Array, "*b 2"],
    steps: UInt8[Array, "*b g"],
    lows: UInt8[Array, "*b g"],
) -> tuple[Float[Array, "*b g"], Float[Array, "*b g"]]:
    """The scales and the minima of small blocks. (Their products with codes are exact
    in float32, being those of a float16 and of integers of so few bits.)"""
    scale = half(step) * steps.astype(jnp.float32)
    return scale, -(half(low) * lows.astype(jnp.float32))


def _whole(scale: Float[Array, "*b 1"]) -> UInt8[Array, "*b 2"]:
    bits = to_bits(scale[..., 0], np.dtype(np.float16))
    return lax.bitcast_convert_type(bits, jnp.uint8)


def fit_scales(
    x: Float[Array, "*b g s"], half_codes: int, half_scales: int
) -> tuple[UInt8[Array, "*b 2"], Float[Array, "*b g"], Float[Array, "*b 256"]]:
    """The scale of large blocks, those of the small ones, from `-half_scales` on, and
    the codes, from `-half_codes` on."""
    scales = best_scale(_flat(x), half_codes).reshape(x.shape[:-1])
    step = _whole(signed_largest(scales) / -half_scales)
    steps = rounded(scales, half(step), -half_scales, half_scales - 1)
    scale = half(step) * steps
    codes = rounded(x, scale[..., None], -half_codes, half_codes - 1)
    return step, steps, large_block(codes)


def join_scales(
    steps: UInt8[Array, "*b 8"], lows: UInt8[Array, "*b 8"]
) -> UInt8[Array, "*b 12"]:
    """Twice eight scales of six bits. The upper two bits of the last four are above the
    first four."""
    six = [
        a[..., :4] | (a[..., 4:] >> np.uint8(4)) << np.uint8(6) for a in (steps, lows)
    ]
    four = steps[..., 4:] & np.uint8(15) | lows[..., 4:] << np.uint8(4)
    return jnp.concatenate([*six, four], axis=-1)


def split_scales(
    packed: UInt8[Array, "*b 12"],
) -> tuple[UInt8[Array, "*b 8"], UInt8[Array, "*b 8"]]:
    """The inverse of `join_scales`."""
    six, four = packed[..., :8], planes(packed[..., 8:], 4, 4)
    first = six & np.uint8(63)
    last = four | six >> np.uint8(6) << np.uint8(4)
    return (
        jnp.concatenate([first[..., :4], last[..., :4]], axis=-1),
        jnp.concatenate([first[..., 4:], last[..., 4:]], axis=-1),
    )


def scale_fields(byte: int) -> tuple[tuple[Code, ...], tuple[Code, ...]]:
    """Where `join_scales` has put the two, in twelve bytes from `byte` on."""

    def fields(first, start):
        low = tuple((BitField(first + i, 0, 6, 0),) for i in range(4))
        return low + tuple(
            (BitField(byte + 8 + i, start, 4, 0), BitField(first + i, 6, 2, 4))
            for i in range(4)
        )

    return fields(byte, 0), fields(byte + 4, 4)
