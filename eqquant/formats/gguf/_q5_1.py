from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int import Int
from .._scale import reciprocal
from ._base import AbstractGGUFBlocks, BlockFields, to_half
from ._search import half_up, range_of


class Q5_1(AbstractGGUFBlocks):
    """GGUF's `Q5_1`: 5-bit integers from 0 to 31, times a scale, plus the minimum, both
    in float16 for each 32 numbers. 6 bits.

    ??? cite "Reference"

        `quantize_row_q5_1_ref` and `dequantize_row_q5_1` of ggml.
    """

    block_size: ClassVar[int] = 32
    base: ClassVar[Int] = Int(5, 32, "minimum")
    type_size: ClassVar[int] = 24
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(8, 16, 4, 16), plane_fields(4, 4, 1, 1, at=4))
    )

    def encode_blocks(self, blocks):
        step, low = range_of(blocks, 31)
        codes = half_up((blocks - low) * reciprocal(step), 0, 32)
        return self.join_blocks(codes, {"step": to_half(step), "low": to_half(low)})
