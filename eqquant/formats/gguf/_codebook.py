"""What GGUF's `IQ1`, `IQ2` and `IQ3` types have in common."""

from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import (
    Array,
    Bool,
    Float,
    Int8 as SignedBytes,
    Integer,
    UInt8,
    UInt16,
    UInt32,
)

from .._int8 import Int8
from ._base import AbstractGGUFBytes, half, planes
from ._codebooks import Codebook


class AbstractCodebook(AbstractGGUFBytes):
    """A type whose codes stand for several numbers each: they are indices of points of
    a codebook. Times a scale, all these numbers are integers of 8 bits, which products
    are computed from.

    Such types can be decoded, but not encoded.

    - `codebook`: the points.
    """

    block_size: ClassVar[int] = 256
    base: eqx.AbstractClassVar[Int8]
    codebook: eqx.AbstractClassVar[Codebook]

    @property
    def bits(self) -> float:
        return 8 * self.type_size / self.block_size

    def encode(self, w, scale=None):
        raise ValueError(
            f"Nothing can be quantized in {self}, which is for reading files: its "
            "codebook needs a search by an importance matrix, as `llama-quantize` of "
            "llama.cpp does. Quantize in `IQ4_XS()`, `Q3_K()` or `Q2_K()` instead."
        )

    def structs(self, shape):
        *lead, k = shape
        size = -(-k // self.block_size) * self.type_size
        return {"blocks": jax.ShapeDtypeStruct((*lead, size), jnp.uint8)}

    def without_infinities(self, stored):
        return stored  # Nothing is encoded.


def odd_multiples(
    scale: UInt8[Array, "*b 2"], steps: Integer[Array, "*b g"], unit: float
) -> Float[Array, "*b g"]:
    """The scales of parts, which are odd multiples of that of the block: `2 steps + 1`.
    (Products are exact in float32.)"""
    odd = 2 * steps.astype(jnp.float32) + 1
    return half(scale) * odd * np.float32(unit)


def signed(
    magnitudes: UInt8[Array, "*b 8"], signs: UInt8[Array, "*b"]
) -> SignedBytes[Array, "*b 8"]:
    """Integers with the signs that are the bits of bytes, the lowest first."""
    negative = planes(signs[..., None], 1, 1).astype(bool)
    magnitudes = magnitudes.astype(jnp.int8)
    return jnp.where(negative, -magnitudes, magnitudes)


def from_levels2(levels: UInt8[Array, "*b"]) -> UInt8[Array, "*b"]:
    """The coordinates of the codebooks of `IQ2` types: 8, 25 and 43."""
    return np.uint8(8) + np.uint8(17) * levels + (levels >> np.uint8(1))


def in_eighths(
    levels: UInt8[Array, "*b 8"], negative: Bool[Array, "*b"]
) -> SignedBytes[Array, "*b 8"]:
    """The numbers of `IQ1` types, in units of an eighth: -1, 0 and 1, and what is added
    to all of a point."""
    less = jnp.where(negative, np.int8(9), np.int8(7))[..., None]
    return np.int8(8) * levels.astype(jnp.int8) - less


def eight_signs(seven: Integer[Array, "*b"]) -> UInt8[Array, "*b"]:
    """The signs of eight numbers, by the first seven: an even number is negative."""
    seven = seven.astype(jnp.uint8)
    return seven | (lax.population_count(seven) & np.uint8(1)) << np.uint8(7)


def fields(
    words: UInt16[Array, "*b"] | UInt32[Array, "*b"], bits: int
) -> UInt8[Array, "*b 4"]:
    """The lowest four fields of so many bits."""
    shifts = np.arange(0, 4 * bits, bits, dtype=words.dtype)
    shifts = shifts.reshape((1,) * words.ndim + (4,))
    found = (words[..., None] >> shifts) & np.asarray(2**bits - 1, words.dtype)
    return found.astype(jnp.uint8)


def words16(bytes: UInt8[Array, "*b j"]) -> UInt16[Array, "*b _"]:
    """Each two bytes as an integer, the lower bits first."""
    *lead, j = bytes.shape
    return lax.bitcast_convert_type(bytes.reshape(*lead, j // 2, 2), jnp.uint16)


def words32(bytes: UInt8[Array, "*b j"]) -> UInt32[Array, "*b _"]:
    """Each four bytes as an integer, the lower bits first."""
    *lead, j = bytes.shape
    return lax.bitcast_convert_type(bytes.reshape(*lead, j // 4, 4), jnp.uint32)


def with_high(
    low: UInt8[Array, "*b"], high: Integer[Array, "*b"]
) -> UInt16[Array, "*b"]:
    """Indices, from their lowest eight bits and the others."""
    return low.astype(jnp.uint16) | high.astype(jnp.uint16) << np.uint16(8)
