from typing import ClassVar

from .._bit_fields import plane_fields
from .._int import Int
from ._base import BlockFields
from ._k import AbstractK
from ._search import RangeSearch


class Q2_K(AbstractK):
    """GGUF's `Q2_K`: 2-bit integers from 0 to 3, times a scale and less an offset for
    each 16 numbers. Scales and offsets are 4-bit integers times two float16 scales for
    each 256 numbers. 2.625 bits.

    ??? cite "Reference"

        `quantize_row_q2_K_ref` and `dequantize_row_q2_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(2, 16, "minimum")
    search: ClassVar[RangeSearch] = RangeSearch(3, -0.5, 15, absolute=True)
    type_size: ClassVar[int] = 84
    scale_at: ClassVar[int] = 80
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(16, 64, 2, 32),
        plane_fields(0, 16, 4, 16)[:16],
        plane_fields(0, 16, 4, 16)[16:],
    )
