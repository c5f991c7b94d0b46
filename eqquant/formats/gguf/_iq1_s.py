from typing import ClassVar

from .._bit_fields import bits_of, joined, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq1


class IQ1_S(AbstractCodebook):
    """GGUF's `IQ1_S`: each eight numbers are one of 2048 points with coordinates -1, 0
    or 1, plus or minus an eighth for each 32 numbers, times a scale for each 32
    numbers. This scale is an odd multiple, of 3 bits, of a float16 scale for each 256
    numbers. 1.5625 bits.

    This type can be read, multiplied and written, but not quantized to.

    ??? cite "Reference"

        `dequantize_row_iq1_s` of ggml.
    """

    type_size: ClassVar[int] = 50
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq1
    fields: ClassVar[CodebookFields] = CodebookFields(
        indices=joined(
            plane_fields(2, 32, 8, 32),
            tuple(bits_of(34 + i // 4 * 2, i % 4 * 3, 3, at=8) for i in range(32)),
        ),
        scale=plane_fields(0, 2, 8, 2),
        steps=tuple(bits_of(34 + 2 * i, 12, 3) for i in range(8)),
        shifts=tuple(bits_of(34 + 2 * i, 15, 1) for i in range(8)),
    )
