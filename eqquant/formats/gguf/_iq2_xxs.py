from typing import ClassVar

from .._bit_fields import bits_of, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq2_xxs


class IQ2_XXS(AbstractCodebook):
    """GGUF's `IQ2_XXS`: each eight numbers are one of 256 points with coordinates 8, 25
    or 43, with signs whose product is positive, times a scale for each 32 numbers. This
    scale is an odd multiple, of 4 bits, of a float16 scale for each 256 numbers. 2.0625
    bits.

    This type can be read, multiplied and written, but not quantized to.

    ??? cite "Reference"

        `dequantize_row_iq2_xxs` of ggml.
    """

    type_size: ClassVar[int] = 66
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq2_xxs
    fields: ClassVar[CodebookFields] = CodebookFields(
        indices=tuple(bits_of(2 + i // 4 * 8 + i % 4, 0, 8) for i in range(32)),
        scale=plane_fields(0, 2, 8, 2),
        steps=tuple(bits_of(6 + 8 * i, 28, 4) for i in range(8)),
        signs=tuple(bits_of(6 + i // 4 * 8, i % 4 * 7, 7) for i in range(32)),
    )
