from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int import Int
from ._base import BlockFields
from ._k import AbstractK
from ._search import IntegerSearch


class Q6_K(AbstractK):
    """GGUF's `Q6_K`: 6-bit integers from -32 to 31, with a scale for each 16 numbers.
    The scales are signed 8-bit integers, times a float16 scale for each 256 numbers.
    6.5625 bits.

    ??? cite "Reference"

        `quantize_row_q6_K_ref` and `dequantize_row_q6_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(6, 16)
    search: ClassVar[IntegerSearch] = IntegerSearch(32)
    type_size: ClassVar[int] = 210
    scale_at: ClassVar[int] = 208
    halves: ClassVar[int] = 1
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(0, 128, 4, 64), plane_fields(128, 64, 2, 32, at=4)),
        plane_fields(192, 16, 8, 16),
        signed=True,
    )
