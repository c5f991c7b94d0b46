from typing import ClassVar

from .._int8 import Int8
from ._base import cut, in_rows, planes
from ._codebook import (
    AbstractCodebook,
    from_levels2,
    odd_multiples,
    signed,
    with_high,
)
from ._codebooks import Codebook, iq2_s


class IQ2_S(AbstractCodebook):
    """GGUF's `IQ2_S`: each eight numbers are one of 1024 points whose coordinates are
    8, 25 or 43, with any signs. Times a scale for each 16 numbers: an odd multiple, of
    4 bits, of one in float16 for each 256. 2.5625 bits.

    Files of this type are read, multiplied and written again. Nothing can be quantized
    in it.

    !!! Example

        ```python
        q = eqquant.interop.open("model.gguf")["blk.0.ffn_up.weight"]
        ```

    ??? cite "Reference"

        `dequantize_row_iq2_s` of ggml.
    """

    type_size: ClassVar[int] = 82
    base: ClassVar[Int8] = Int8(16)
    codebook: ClassVar[Codebook] = iq2_s

    def split_blocks(self, blocks):
        step, low, signs, high, steps = cut(blocks, (2, 32, 32, 8, 8))
        index = with_high(low, planes(high, 2, 1))
        codes = signed(from_levels2(self.codebook.levels(index)), signs)
        return in_rows(codes), odd_multiples(step, planes(steps, 4, 1), 1 / 8), None
