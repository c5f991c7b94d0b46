from typing import ClassVar

from .._bit_fields import plane_fields
from .._int import Int
from ._base import BlockFields
from ._k import (
    AbstractK,
    scale_fields,
)
from ._search import RangeSearch


class Q4_K(AbstractK):
    """GGUF's `Q4_K`: 4-bit integers from 0 to 15, times a scale and less an offset for
    each 32 numbers. Scales and offsets are 6-bit integers times two float16 scales for
    each 256 numbers. 4.5 bits.

    ??? cite "Reference"

        `quantize_row_q4_K_ref` and `dequantize_row_q4_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(4, 32, "minimum")
    search: ClassVar[RangeSearch] = RangeSearch(15, -1.0, 20)
    type_size: ClassVar[int] = 144
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(16, 128, 4, 32), *scale_fields(4)
    )
