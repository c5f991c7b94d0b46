from typing import ClassVar

from .._bit_fields import bits_of, joined, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq1


class IQ1_M(AbstractCodebook):
    """GGUF's `IQ1_M`: each eight numbers are one of 2048 points with coordinates -1, 0
    or 1, plus or minus an eighth, times a scale for each 16 numbers. This scale is an
    odd multiple, of 3 bits, of a float16 scale for each 256 numbers. 1.75 bits.

    This type can be read, multiplied and written, but not quantized to.

    ??? cite "Reference"

        `dequantize_row_iq1_m` of ggml.
    """

    type_size: ClassVar[int] = 56
    base: ClassVar[Int8] = Int8(16)
    codebook: ClassVar[Codebook] = iq1
    fields: ClassVar[CodebookFields] = CodebookFields(
        indices=joined(
            plane_fields(0, 32, 8, 32),
            tuple(bits_of(32, 4 * i, 3, at=8) for i in range(32)),
        ),
        # Four bits in each of four words, above the other fields.
        scale=tuple(bits_of(at, 4, 4) + bits_of(at + 2, 4, 4, at=4) for at in (49, 53)),
        steps=tuple(bits_of(48 + i // 4 * 2, i % 4 * 3, 3) for i in range(16)),
        shifts=tuple(bits_of(32, 4 * i + 3, 1) for i in range(32)),
    )
