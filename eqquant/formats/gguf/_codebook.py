"""The common base of GGUF's `IQ1`, `IQ2` and `IQ3` types."""

from typing import ClassVar, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Int8 as SignedBytes, UInt8

from .._bit_fields import Code, plane_fields
from .._int8 import Int8
from ._base import AbstractGGUFBytes, half, in_rows
from ._codebooks import Codebook
from ._fields import read


class CodebookFields(NamedTuple):
    """The places of the integers in the bytes of a block.

    - `indices`: the index of each point.
    - `scale`: the two bytes of the scale of the block, in float16.
    - `steps`: an integer `i` for each part, whose scale is `2 i + 1` times the scale of
        the block, up to the unit of the codebook.
    - `signs`: for each eight numbers, a bit for each, which is set if it is negative.
        If the eighth bit is missing, an even number of them is negative.
    - `shifts`: used instead of `signs`: whether an eighth is subtracted from each of
        some numbers. Otherwise it is added.
    """

    indices: tuple[Code, ...]
    scale: tuple[Code, ...]
    steps: tuple[Code, ...]
    signs: tuple[Code, ...] = ()
    shifts: tuple[Code, ...] = ()


class AbstractCodebook(AbstractGGUFBytes):
    """A type each of whose codes stands for several numbers: it is the index of a point
    of a codebook. In units of the scale, all numbers are integers of 8 bits, from which
    products are computed.

    Such types can be decoded, but not encoded.

    - `codebook`: the points.
    - `fields`: the places of their indices, with the signs and scales.
    """

    block_size: ClassVar[int] = 256
    base: eqx.AbstractClassVar[Int8]
    codebook: eqx.AbstractClassVar[Codebook]
    fields: eqx.AbstractClassVar[CodebookFields]

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

    def split_blocks(self, blocks):
        fields = self.fields
        codes = in_rows(self.codebook.numbers(read(blocks, fields.indices)))
        if fields.signs:
            signs = read(blocks, fields.signs)
            seven = sum(field.number for field in fields.signs[0]) == 7
            codes = _signed(codes, _eight_signs(signs) if seven else signs)
        if fields.shifts:
            # (A unit of the codebook is an eighth.)
            shifts = 1 - 2 * read(blocks, fields.shifts).astype(jnp.int8)
            codes = codes.reshape(*shifts.shape, -1) + shifts[..., None]
            codes = in_rows(codes)
        # (Products are exact in float32.)
        odd = 2 * read(blocks, fields.steps).astype(jnp.float32) + 1
        scale = half(read(blocks, fields.scale)) * odd * np.float32(self.codebook.unit)
        return codes, scale, None


def _signed(
    magnitudes: SignedBytes[Array, "*b s"], signs: UInt8[Array, "*b p"]
) -> SignedBytes[Array, "*b s"]:
    """Applies signs, which are the bits of bytes, the lowest first."""
    bits = plane_fields(0, signs.shape[-1], 1, 1)
    return jnp.where(read(signs, bits).astype(bool), -magnitudes, magnitudes)


def _eight_signs(seven: UInt8[Array, "*b"]) -> UInt8[Array, "*b"]:
    """Completes the signs of eight numbers from the first seven: an even number is
    negative."""
    return seven | (lax.population_count(seven) & np.uint8(1)) << np.uint8(7)
