from typing import ClassVar

import numpy as np

from .._int8 import Int8
from ._base import cut, in_rows, planes
from ._codebook import (
    AbstractCodebook,
    eight_signs,
    from_levels2,
    odd_multiples,
    signed,
    words16,
)
from ._codebooks import Codebook, iq2_xs


class IQ2_XS(AbstractCodebook):
    """GGUF's `IQ2_XS`: each eight numbers are one of 512 points whose coordinates are
    8, 25 or 43, with signs whose product is positive. Times a scale for each 16
    numbers: an odd multiple, of 4 bits, of one in float16 for each 256. 2.3125 bits.

    Files of this type are read, multiplied and written again. Nothing can be quantized
    in it.

    !!! Example

        ```python
        q = eqquant.interop.open("model.gguf")["blk.0.ffn_up.weight"]
        ```

    ??? cite "Reference"

        `dequantize_row_iq2_xs` of ggml.
    """

    type_size: ClassVar[int] = 74
    base: ClassVar[Int8] = Int8(16)
    codebook: ClassVar[Codebook] = iq2_xs

    def split_blocks(self, blocks):
        step, packed, steps = cut(blocks, (2, 64, 8))
        words = words16(packed)
        magnitudes = from_levels2(self.codebook.levels(words & np.uint16(511)))
        codes = signed(magnitudes, eight_signs(words >> np.uint16(9)))
        return in_rows(codes), odd_multiples(step, planes(steps, 4, 1), 1 / 8), None
