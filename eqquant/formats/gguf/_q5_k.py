from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int import Int
from ._base import BlockFields
from ._k import (
    AbstractK,
    scale_fields,
)
from ._search import RangeSearch


class Q5_K(AbstractK):
    """GGUF's `Q5_K`: 5-bit integers from 0 to 31, times a scale and less an offset for
    each 32 numbers. Scales and offsets are 6-bit integers times two float16 scales for
    each 256 numbers. 5.5 bits.

    ??? cite "Reference"

        `quantize_row_q5_K_ref` and `dequantize_row_q5_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(5, 32, "minimum")
    search: ClassVar[RangeSearch] = RangeSearch(31, -0.5, 15)
    type_size: ClassVar[int] = 176
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(48, 128, 4, 32), plane_fields(16, 32, 1, 32, at=4)),
        *scale_fields(4),
    )
