from typing import ClassVar

import numpy as np

from .._int8 import Int8
from ._base import as_blocks, cut, in_rows
from ._codebook import (
    AbstractCodebook,
    eight_signs,
    fields,
    from_levels2,
    odd_multiples,
    signed,
    words32,
)
from ._codebooks import Codebook, iq2_xxs


class IQ2_XXS(AbstractCodebook):
    """GGUF's `IQ2_XXS`: each eight numbers are one of 256 points whose coordinates are
    8, 25 or 43, with signs whose product is positive. Times a scale for each 32
    numbers: an odd multiple, of 4 bits, of one in float16 for each 256. 2.0625 bits.

    Files of this type are read, multiplied and written again. Nothing can be quantized
    in it.

    !!! Example

        ```python
        q = eqquant.interop.open("model.gguf")["blk.0.ffn_up.weight"]
        ```

    ??? cite "Reference"

        `dequantize_row_iq2_xxs` of ggml.
    """

    type_size: ClassVar[int] = 66
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq2_xxs

    def split_blocks(self, blocks):
        step, packed = cut(blocks, (2, 64))
        index, rest = cut(as_blocks(packed, 8), (4, 4))
        words = words32(rest)[..., 0]
        magnitudes = from_levels2(self.codebook.levels(in_rows(index)))
        codes = signed(magnitudes, eight_signs(in_rows(fields(words, 7))))
        return in_rows(codes), odd_multiples(step, words >> np.uint32(28), 1 / 8), None
