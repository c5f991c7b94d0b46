from typing import ClassVar

from .._bit_fields import bits_of, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq3_xxs


class IQ3_XXS(AbstractCodebook):
    """GGUF's `IQ3_XXS`: each four numbers are one of 256 points, whose coordinates are
    among eight numbers from 4 to 62, times a scale for each 32 numbers. The product of
    the signs of eight numbers is positive. The scale is an odd multiple, of 4 bits, of
    a float16 scale for each 256 numbers. 3.0625 bits.

    This type can be read, multiplied and written, but not quantized to.

    ??? cite "Reference"

        `dequantize_row_iq3_xxs` of ggml.
    """

    type_size: ClassVar[int] = 98
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq3_xxs
    fields: ClassVar[CodebookFields] = CodebookFields(
        indices=plane_fields(2, 64, 8, 64),
        scale=plane_fields(0, 2, 8, 2),
        steps=tuple(bits_of(66 + 4 * i, 28, 4) for i in range(8)),
        signs=tuple(bits_of(66 + i // 4 * 4, i % 4 * 7, 7) for i in range(32)),
    )
