from typing import ClassVar

from .._bit_fields import bits_of, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq2_xs


class IQ2_XS(AbstractCodebook):
    """GGUF's `IQ2_XS`: each eight numbers are one of 512 points with coordinates 8, 25
    or 43, with signs whose product is positive, times a scale for each 16 numbers. This
    scale is an odd multiple, of 4 bits, of a float16 scale for each 256 numbers. 2.3125
    bits.

    This type can be read, multiplied and written, but not quantized to.

    ??? cite "Reference"

        `dequantize_row_iq2_xs` of ggml.
    """

    type_size: ClassVar[int] = 74
    base: ClassVar[Int8] = Int8(16)
    codebook: ClassVar[Codebook] = iq2_xs
    fields: ClassVar[CodebookFields] = CodebookFields(
        indices=tuple(bits_of(2 + 2 * i, 0, 9) for i in range(32)),
        scale=plane_fields(0, 2, 8, 2),
        steps=plane_fields(66, 8, 4, 1),
        signs=tuple(bits_of(2 + 2 * i, 9, 7) for i in range(32)),
    )
