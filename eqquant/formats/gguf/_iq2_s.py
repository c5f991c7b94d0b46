from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq2_s


class IQ2_S(AbstractCodebook):
    """GGUF's `IQ2_S`: each eight numbers are one of 1024 points with coordinates 8, 25
    or 43, with any signs, times a scale for each 16 numbers. This scale is an odd
    multiple, of 4 bits, of a float16 scale for each 256 numbers. 2.5625 bits.

    This type can be read, multiplied and written, but not quantized to.

    ??? cite "Reference"

        `dequantize_row_iq2_s` of ggml.
    """

    type_size: ClassVar[int] = 82
    base: ClassVar[Int8] = Int8(16)
    codebook: ClassVar[Codebook] = iq2_s
    fields: ClassVar[CodebookFields] = CodebookFields(
        indices=joined(plane_fields(2, 32, 8, 32), plane_fields(66, 8, 2, 1, at=8)),
        scale=plane_fields(0, 2, 8, 2),
        steps=plane_fields(74, 8, 4, 1),
        signs=plane_fields(34, 32, 8, 32),
    )
