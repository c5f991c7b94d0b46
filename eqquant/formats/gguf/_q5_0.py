from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int import Int
from .._scale import reciprocal
from ._base import AbstractGGUFBlocks, BlockFields, to_half
from ._search import half_up, signed_largest


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
    halves: ClassVar[int] = 1
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(6, 16, 4, 16), plane_fields(2, 4, 1, 1, at=4))
    )

    def encode_blocks(self, blocks):
        scale = signed_largest(blocks) / -16
        codes = half_up(blocks * reciprocal(scale), 16, 32)
        return self.join_blocks(codes, {"step": to_half(scale)})
