"""GGUF's `IQ1`, `IQ2` and `IQ3` types. They can be read, multiplied and written, but
not quantized to."""

from typing import ClassVar

from .._bit_fields import bits_of, joined, plane_fields
from .._int8 import Int8
from ._codebook import AbstractCodebook, CodebookFields
from ._codebooks import Codebook, iq1, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs


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
