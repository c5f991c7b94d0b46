"""The common base of GGUF's `K` types: blocks of 256 numbers that consist of small
blocks, each with a scale of a few bits, and perhaps a minimum of the same number of
bits."""

from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Shaped, UInt8

from .._adjustable import Parameters
from .._base import Stored
from .._bit_fields import BitField, Code
from .._scale import to_bits
from ._base import AbstractGGUFBlocks, as_blocks, half, in_rows
from ._search import (
    each_rounded,
    IntegerSearch,
    PointSearch,
    RangeSearch,
    rounded,
    signed_largest,
)


def small_blocks(x: Float[Array, "*b 256"], size: int) -> Float[Array, "*b g s"]:
    return x.reshape(*x.shape[:-1], 256 // size, size)


def large_block(x: Shaped[Array, "*b g s"]) -> Shaped[Array, "*b 256"]:
    """The inverse of `small_blocks`."""
    return x.reshape(*x.shape[:-2], 256)


def _flat(x: Float[Array, "*b h g s"]) -> Float[Array, "*b _ s"]:
    *lead, number, few, size = x.shape
    return x.reshape(*lead, number * few, size)


def _fit_ranges(
    x: Float[Array, "*b g s"], search: RangeSearch, most_scale: int
) -> tuple[UInt8[Array, "*b 256"], Stored]:
    """Returns the codes and the scales: the scales of large and of small blocks, and
    how far below zero the latter begin, up to `most_scale`."""
    scale, below = (a.reshape(x.shape[:-1]) for a in search.best(_flat(x)))
    scales = _share(scale, below, search.most, most_scale)
    scale, low = _read_ranges(scales)
    codes = rounded(x - low[..., None], scale[..., None], 0, search.most)
    return large_block(codes).astype(jnp.uint8), scales


def _share(
    scale: Float[Array, "*b g"], below: Float[Array, "*b g"], most: int, most_scale: int
) -> Stored:
    """Returns the scales of small blocks, and how far below zero they begin, as
    integers up to `most_scale` times two scales of the large block."""
    step, few = _as_integers(scale, most_scale)
    # A block whose scale becomes zero is constant: it decodes to the middle of its
    # range.
    middle = jnp.maximum(below - each_rounded(scale * (most / 2)), 0)
    low, few_below = _as_integers(jnp.where(few == 0, middle, below), most_scale)
    return {"step": step, "low": low, "steps": few, "lows": few_below}


def _as_integers(
    scale: Float[Array, "*b g"], most: int
) -> tuple[UInt8[Array, "*b 2"], UInt8[Array, "*b g"]]:
    """Returns the scale of large blocks, and the scales of small blocks in units of
    it."""
    largest = jnp.max(scale, axis=-1, keepdims=True)
    whole = _whole(largest * np.float32(1 / most))
    return whole, rounded(scale, half(whole), 0, most).astype(jnp.uint8)


def _read_ranges(scales: Stored) -> tuple[Float[Array, "*b g"], Float[Array, "*b g"]]:
    scale = half(scales["step"]) * scales["steps"].astype(jnp.float32)
    return scale, -(half(scales["low"]) * scales["lows"].astype(jnp.float32))


def _whole(scale: Float[Array, "*b 1"]) -> UInt8[Array, "*b 2"]:
    bits = to_bits(scale[..., 0], np.dtype(np.float16))
    return lax.bitcast_convert_type(bits, jnp.uint8)


def _fit_scales(
    x: Float[Array, "*b g s"], search: IntegerSearch | PointSearch, half_scales: int
) -> tuple[UInt8[Array, "*b 256"], Stored]:
    """Returns the codes and the scales: the scales of large blocks, and the scales of
    small blocks, from `-half_scales` on."""
    scales = _share_signed(search.best(_flat(x)).reshape(x.shape[:-1]), half_scales)
    scale = half(scales["step"]) * scales["steps"]
    return large_block(search.to_codes(x, scale[..., None])), scales


def _share_signed(scale: Float[Array, "*b g"], half_scales: int) -> Stored:
    """Returns the scales of small blocks as integers from `-half_scales` on, times a
    scale of the large block."""
    step = _whole(signed_largest(scale) / -half_scales)
    return {
        "step": step,
        "steps": rounded(scale, half(step), -half_scales, half_scales - 1),
    }


class AbstractK(AbstractGGUFBlocks):
    """A type whose blocks consist of small blocks. The scales of these are integers,
    times a scale of the large block.

    - `search`: finds the scales of small blocks.
    """

    block_size: ClassVar[int] = 256
    joint: ClassVar[bool] = True
    search: eqx.AbstractClassVar[IntegerSearch | PointSearch | RangeSearch]

    def encode_blocks(self, blocks):
        x = small_blocks(blocks, self._part)
        if isinstance(self.search, RangeSearch):
            fitted = _fit_ranges(x, self.search, self.steps - 1)
        else:
            fitted = _fit_scales(x, self.search, self.steps // 2)
        return self.join_blocks(*fitted)

    @property
    def steps(self) -> int:
        """The number of possible scales of a small block."""
        return 2 ** sum(field.number for field in self.fields.steps[0])

    def candidates(self, blocks, size):
        if self.base.offset is None:
            return self.base.candidates(blocks, size)
        # Minima are never above zero.
        low = jnp.minimum(jnp.min(blocks, axis=-1, keepdims=True), 0)
        high = jnp.max(blocks, axis=-1, keepdims=True)
        ends = jnp.concatenate([low, high], axis=-1)
        return self.base.candidates(ends, np.full_like(size, 2))

    def held(self, parameters):
        scale, offset = parameters
        if offset is None:
            return parameters
        return Parameters(jnp.maximum(scale, 0), jnp.minimum(offset, 0))

    def settled(self, parameters):
        scale, offset = self.held(parameters)
        few, number = len(self.fields.steps), scale.shape[-1]
        missing = [(0, 0)] * (scale.ndim - 1) + [(0, -number % few)]
        in_large = lambda a: as_blocks(jnp.pad(a, missing), few)
        in_small = lambda a: in_rows(a)[..., :number]
        if offset is None:
            scales = _share_signed(in_large(scale), self.steps // 2)
            read = half(scales["step"]) * scales["steps"]
            return scales, Parameters(in_small(read), None)
        scale, below = in_large(scale), in_large(-offset)
        scales = _share(scale, below, self.base.levels - 1, self.steps - 1)
        read = Parameters(*_read_ranges(scales))
        return scales, Parameters(*map(in_small, read))


def scale_fields(byte: int) -> tuple[tuple[Code, ...], tuple[Code, ...]]:
    """Returns the places of two groups of eight scales of six bits, in twelve bytes
    from `byte` on. The upper two bits of the last four scales are above the first
    four."""

    def fields(first, start):
        low = tuple((BitField(first + i, 0, 6, 0),) for i in range(4))
        return low + tuple(
            (BitField(byte + 8 + i, start, 4, 0), BitField(first + i, 6, 2, 4))
            for i in range(4)
        )

    return fields(byte, 0), fields(byte + 4, 4)
