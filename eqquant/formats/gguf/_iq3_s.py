from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq3_s


class IQ3_S(AbstractCodebook):
    """GGUF's `IQ3_S`: each four numbers are one of 512 points with odd coordinates from
    1 to 15, with any signs, times a scale for each 32 numbers. This scale is an odd
    multiple, of 4 bits, of a float16 scale for each 256 numbers. 3.4375 bits.

    This type can be read, multiplied and written, but not quantized to.

    ??? cite "Reference"

        `dequantize_row_iq3_s` of ggml.
    """

    type_size: ClassVar[int] = 110
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq3_s
    fields: ClassVar[CodebookFields] = CodebookFields(
        indices=joined(plane_fields(2, 64, 8, 64), plane_fields(66, 8, 1, 1, at=8)),
        scale=plane_fields(0, 2, 8, 2),
        steps=plane_fields(106, 4, 4, 1),
        signs=plane_fields(74, 32, 8, 32),
    )
