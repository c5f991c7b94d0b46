"""GGUF's first types, `Q4_0` to `Q8_0`, which llama.cpp calls legacy."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._bit_fields import Code, joined, plane_fields
from .._blocks import absmax
from .._int import Int
from .._scale import divided, reciprocal
from ._base import AbstractGGUFBlocks, AbstractGGUFGrid, BlockFields, to_half
from ._planes import AbstractGGUFPlanes
from ._search import half_away, half_up, range_of, signed_largest


class Q4_0(AbstractGGUFPlanes):
    """GGUF's `Q4_0`: 4-bit integers from -8 to 7, with a float16 scale for each 32
    numbers. The number with the largest absolute value becomes -8 times the scale, and
    is exact up to the rounding of the scale. 4.5 bits.

    ??? cite "Reference"

        `quantize_row_q4_0_ref` and `dequantize_row_q4_0` of ggml.
    """

    block_size: ClassVar[int] = 32
    levels: ClassVar[int] = 16
    type_size: ClassVar[int] = 18
    width: ClassVar[int] = 16
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        return signed_largest(blocks) / -8

    def to_codes(self, blocks, size, scale):
        return half_up(blocks * reciprocal(scale), 8, 16)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 8


class Q5_0(AbstractGGUFBlocks):
    """GGUF's `Q5_0`: 5-bit integers from -16 to 15, with a float16 scale for each 32
    numbers. The number with the largest absolute value becomes -16 times the scale, and
    is exact up to the rounding of the scale. 5.5 bits.

    ??? cite "Reference"

        `quantize_row_q5_0_ref` and `dequantize_row_q5_0` of ggml.
    """

    block_size: ClassVar[int] = 32
    base: ClassVar[Int] = Int(5, 32)
    type_size: ClassVar[int] = 22
    scale_at: ClassVar[int] = 0
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(6, 16, 4, 16), plane_fields(2, 4, 1, 1, at=4))
    )

    def encode_blocks(self, blocks):
        scale = signed_largest(blocks) / -16
        codes = half_up(blocks * reciprocal(scale), 16, 32)
        return self.join_blocks(codes, {"step": to_half(scale)})


class Q8_0(AbstractGGUFGrid):
    """GGUF's `Q8_0`: 8-bit integers, with a float16 scale for each 32 numbers: the
    largest absolute value divided by 127. Rounds half away from zero. 8.5 bits.

    ??? cite "Reference"

        `quantize_row_q8_0_ref` and `dequantize_row_q8_0` of ggml.
    """

    block_size: ClassVar[int] = 32
    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    levels: ClassVar[int] = 256
    type_size: ClassVar[int] = 34
    scale_at: ClassVar[int] = 0
    signed: ClassVar[bool] = True
    fields: ClassVar[tuple[Code, ...]] = plane_fields(2, 32, 8, 32)

    def fit(self, blocks, size):
        largest = absmax(blocks)
        return divided(largest, 127)

    def to_codes(self, blocks, size, scale):
        codes = half_away(blocks * reciprocal(scale))
        return jnp.clip(codes, -127, 127).astype(jnp.int8)

    def to_points(self, codes):
        return codes.astype(jnp.float32)


class _AbstractRange(AbstractGGUFBlocks):
    block_size: ClassVar[int] = 32
    scale_at: ClassVar[int] = 0

    def encode_blocks(self, blocks):
        levels = self.base.levels
        step, low = range_of(blocks, levels - 1)
        codes = half_up((blocks - low) * reciprocal(step), 0, levels)
        return self.join_blocks(codes, {"step": to_half(step), "low": to_half(low)})


class Q4_1(_AbstractRange):
    """GGUF's `Q4_1`: 4-bit integers from 0 to 15, times a scale, plus the minimum, both
    in float16 for each 32 numbers. 5 bits.

    ??? cite "Reference"

        `quantize_row_q4_1_ref` and `dequantize_row_q4_1` of ggml.
    """

    base: ClassVar[Int] = Int(4, 32, "minimum")
    type_size: ClassVar[int] = 20
    fields: ClassVar[BlockFields] = BlockFields(plane_fields(4, 16, 4, 16))


class Q5_1(_AbstractRange):
    """GGUF's `Q5_1`: 5-bit integers from 0 to 31, times a scale, plus the minimum, both
    in float16 for each 32 numbers. 6 bits.

    ??? cite "Reference"

        `quantize_row_q5_1_ref` and `dequantize_row_q5_1` of ggml.
    """

    base: ClassVar[Int] = Int(5, 32, "minimum")
    type_size: ClassVar[int] = 24
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(8, 16, 4, 16), plane_fields(4, 4, 1, 1, at=4))
    )
