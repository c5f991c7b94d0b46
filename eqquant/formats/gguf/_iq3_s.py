from typing import ClassVar

import numpy as np

from .._int8 import Int8
from ._base import cut, in_rows, planes
from ._codebook import AbstractCodebook, odd_multiples, signed, with_high
from ._codebooks import Codebook, iq3_s


class IQ3_S(AbstractCodebook):
    """GGUF's `IQ3_S`: each four numbers are one of 512 points whose coordinates are
    odd, from 1 to 15, with any signs. Times a scale for each 32 numbers: an odd
    multiple, of 4 bits, of one in float16 for each 256. 3.4375 bits.

    Files of this type are read, multiplied and written again. Nothing can be quantized
    in it.

    !!! Example

        ```python
        q = eqquant.interop.open("model.gguf")["blk.0.ffn_up.weight"]
        ```

    ??? cite "Reference"

        `dequantize_row_iq3_s` of ggml.
    """

    type_size: ClassVar[int] = 110
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq3_s

    def split_blocks(self, blocks):
        step, low, high, signs, steps = cut(blocks, (2, 64, 8, 32, 4))
        levels = self.codebook.levels(with_high(low, planes(high, 1, 1)))
        magnitudes = np.uint8(2) * levels + np.uint8(1)
        codes = signed(magnitudes.reshape(*signs.shape, 8), signs)
        return in_rows(codes), odd_multiples(step, planes(steps, 4, 1), 1.0), None
