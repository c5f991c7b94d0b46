from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8

from .._bit_fields import Code, plane_fields
from .._blocks import absmax
from .._scale import reciprocal
from ._base import AbstractGGUFGrid
from ._search import half_away


class AbstractTQ(AbstractGGUFGrid):
    """-1, 0 or 1, times the largest absolute value of the block, in float16. Subclasses
    differ in how they pack the codes."""

    block_size: ClassVar[int] = 256
    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    levels: ClassVar[int] = 3

    def fit(self, blocks, size):
        return absmax(blocks)

    def to_codes(self, blocks, size, scale):
        codes = 1 + half_away(blocks * reciprocal(scale))
        return jnp.clip(codes, 0, 2).astype(jnp.uint8)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 1


# For each group of bytes in a block of a file: the number of bytes, and of codes in
# each.
_groups = ((32, 5), (16, 5), (4, 4))


class TQ1_0(AbstractTQ):
    """GGUF's `TQ1_0`: -1, 0 or 1, with a float16 scale for each 256 numbers: the
    largest absolute value. 1.6875 bits in a file. Here, all bytes have five codes:
    1.6625 bits.

    This is for weights that are ternary already, with one absolute value in each block.
    Other weights lose most of their information: see [`eqquant.Ternary`][].

    ??? cite "Reference"

        `quantize_row_tq1_0_ref` and `dequantize_row_tq1_0` of ggml.
    """

    type_size: ClassVar[int] = 54
    scale_at: ClassVar[int] = 52
    fields: ClassVar[None] = None

    def read_codes(self, blocks):
        packed = _cut(blocks, [width for width, _ in _groups])
        codes = [
            # The digits are digits of a fraction, base three: the first is the highest.
            (bytes * np.uint8(3**i)).astype(jnp.uint16) * np.uint16(3) >> np.uint16(8)
            for bytes, (_, number) in zip(packed, _groups)
            for i in range(number)
        ]
        return jnp.concatenate(codes, axis=-1).astype(jnp.uint8)

    def join_blocks(self, codes, scale):
        sizes = [width * number for width, number in _groups]
        packed = []
        for part, (width, number) in zip(_cut(codes, sizes), _groups):
            part = part.reshape(*part.shape[:-1], number, width).astype(jnp.uint16)
            weights = 3 ** np.arange(4, 4 - number, -1).astype(np.uint16)
            weights = weights.reshape((1,) * (part.ndim - 2) + (number, 1))
            total = jnp.sum(part * weights, axis=-2, dtype=jnp.uint16)
            packed.append((total * 256 + 242) // 243)
        packed = jnp.concatenate(packed, axis=-1).astype(jnp.uint8)
        return jnp.concatenate([packed, scale], axis=-1)


def _cut(x: UInt8[Array, "*b _"], sizes: Sequence[int]) -> list[UInt8[Array, "*b _"]]:
    """Cuts blocks into parts of these sizes, in bytes or codes."""
    ends = np.cumsum(sizes).tolist()
    return [x[..., end - size : end] for size, end in zip(sizes, ends)]


class TQ2_0(AbstractTQ):
    """GGUF's `TQ2_0`: -1, 0 or 1, with a float16 scale for each 256 numbers: the
    largest absolute value. Four codes to a byte: 2.0625 bits.

    This is for weights that are ternary already, with one absolute value in each block.
    Other weights lose most of their information: see [`eqquant.Ternary`][].

    ??? cite "Reference"

        `quantize_row_tq2_0_ref` and `dequantize_row_tq2_0` of ggml.
    """

    radix: ClassVar[int] = 4
    type_size: ClassVar[int] = 66
    scale_at: ClassVar[int] = 64
    fields: ClassVar[tuple[Code, ...]] = plane_fields(0, 64, 2, 32)
