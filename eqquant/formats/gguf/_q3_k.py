from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int import Int
from ._base import BlockFields
from ._k import AbstractK
from ._search import IntegerSearch


class Q3_K(AbstractK):
    """GGUF's `Q3_K`: 3-bit integers from -4 to 3, with a scale for each 16 numbers. The
    scales are signed 6-bit integers, times a float16 scale for each 256 numbers. 3.4375
    bits.

    ??? cite "Reference"

        `quantize_row_q3_K_ref` and `dequantize_row_q3_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(3, 16)
    search: ClassVar[IntegerSearch] = IntegerSearch(4)
    type_size: ClassVar[int] = 110
    scale_at: ClassVar[int] = 108
    halves: ClassVar[int] = 1
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(32, 64, 2, 32), plane_fields(0, 32, 1, 32, at=2)),
        joined(plane_fields(96, 8, 4, 8), plane_fields(104, 4, 2, 4, at=4)),
        zero=32,
    )
