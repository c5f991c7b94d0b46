from typing import ClassVar

from .._bit_fields import plane_fields
from .._int import Int
from .._scale import reciprocal
from ._base import (
    AbstractGGUFBlocks,
    BlockFields,
    to_half,
)
from ._search import half_up, range_of


class Q4_1(AbstractGGUFBlocks):
    """GGUF's `Q4_1`: 4-bit integers from 0 to 15, times a scale, plus the minimum, both
    in float16 for each 32 numbers. 5 bits.

    ??? cite "Reference"

        `quantize_row_q4_1_ref` and `dequantize_row_q4_1` of ggml.
    """

    block_size: ClassVar[int] = 32
    base: ClassVar[Int] = Int(4, 32, "minimum")
    type_size: ClassVar[int] = 20
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(plane_fields(4, 16, 4, 16))

    def encode_blocks(self, blocks):
        step, low = range_of(blocks, 15)
        codes = half_up((blocks - low) * reciprocal(step), 0, 16)
        return self.join_blocks(codes, {"step": to_half(step), "low": to_half(low)})
