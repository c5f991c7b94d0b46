"""GGUF's types `Q2_K` to `Q6_K`."""

from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int import Int
from ._base import BlockFields
from ._k import AbstractK, scale_fields
from ._search import IntegerSearch, RangeSearch


class Q2_K(AbstractK):
    """GGUF's `Q2_K`: 2-bit integers from 0 to 3, times a scale and less an offset for
    each 16 numbers. Scales and offsets are 4-bit integers times two float16 scales for
    each 256 numbers. 2.625 bits.

    ??? cite "Reference"

        `quantize_row_q2_K_ref` and `dequantize_row_q2_K` of ggml.
    """

    base: ClassVar[Int] = Int(2, 16, "minimum")
    search: ClassVar[RangeSearch] = RangeSearch(3, -0.5, 15, absolute=True)
    type_size: ClassVar[int] = 84
    scale_at: ClassVar[int] = 80
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(16, 64, 2, 32),
        plane_fields(0, 16, 4, 16)[:16],
        plane_fields(0, 16, 4, 16)[16:],
    )


class Q3_K(AbstractK):
    """GGUF's `Q3_K`: 3-bit integers from -4 to 3, with a scale for each 16 numbers. The
    scales are signed 6-bit integers, times a float16 scale for each 256 numbers. 3.4375
    bits.

    ??? cite "Reference"

        `quantize_row_q3_K_ref` and `dequantize_row_q3_K` of ggml.
    """

    base: ClassVar[Int] = Int(3, 16)
    search: ClassVar[IntegerSearch] = IntegerSearch(4)
    type_size: ClassVar[int] = 110
    scale_at: ClassVar[int] = 108
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(32, 64, 2, 32), plane_fields(0, 32, 1, 32, at=2)),
        joined(plane_fields(96, 8, 4, 8), plane_fields(104, 4, 2, 4, at=4)),
        zero=32,
    )


class Q4_K(AbstractK):
    """GGUF's `Q4_K`: 4-bit integers from 0 to 15, times a scale and less an offset for
    each 32 numbers. Scales and offsets are 6-bit integers times two float16 scales for
    each 256 numbers. 4.5 bits.

    ??? cite "Reference"

        `quantize_row_q4_K_ref` and `dequantize_row_q4_K` of ggml.
    """

    base: ClassVar[Int] = Int(4, 32, "minimum")
    search: ClassVar[RangeSearch] = RangeSearch(15, -1.0, 20)
    type_size: ClassVar[int] = 144
    scale_at: ClassVar[int] = 0
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(16, 128, 4, 32), *scale_fields(4)
    )


class Q5_K(AbstractK):
    """GGUF's `Q5_K`: 5-bit integers from 0 to 31, times a scale and less an offset for
    each 32 numbers. Scales and offsets are 6-bit integers times two float16 scales for
    each 256 numbers. 5.5 bits.

    ??? cite "Reference"

        `quantize_row_q5_K_ref` and `dequantize_row_q5_K` of ggml.
    """

    base: ClassVar[Int] = Int(5, 32, "minimum")
    search: ClassVar[RangeSearch] = RangeSearch(31, -0.5, 15)
    type_size: ClassVar[int] = 176
    scale_at: ClassVar[int] = 0
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(48, 128, 4, 32), plane_fields(16, 32, 1, 32, at=4)),
        *scale_fields(4),
    )


class Q6_K(AbstractK):
    """GGUF's `Q6_K`: 6-bit integers from -32 to 31, with a scale for each 16 numbers.
    The scales are signed 8-bit integers, times a float16 scale for each 256 numbers.
    6.5625 bits.

    ??? cite "Reference"

        `quantize_row_q6_K_ref` and `dequantize_row_q6_K` of ggml.
    """

    base: ClassVar[Int] = Int(6, 16)
    search: ClassVar[IntegerSearch] = IntegerSearch(32)
    type_size: ClassVar[int] = 210
    scale_at: ClassVar[int] = 208
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(0, 128, 4, 64), plane_fields(128, 64, 2, 32, at=4)),
        plane_fields(192, 16, 8, 16),
        signed=True,
    )
