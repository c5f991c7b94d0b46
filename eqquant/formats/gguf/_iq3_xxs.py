from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from .._int8 import Int8
from ._base import cut, in_rows
from ._codebook import (
    AbstractCodebook,
    eight_signs,
    fields,
    odd_multiples,
    signed,
    words32,
)
from ._codebooks import Codebook, iq3_xxs


class IQ3_XXS(AbstractCodebook):
    """GGUF's `IQ3_XXS`: each four numbers are one of 256 points whose coordinates are
    among eight, from 4 to 62. Of eight, the product of the signs is positive. Times a
    scale for each 32 numbers: an odd multiple, of 4 bits, of one in float16 for each
    256. 3.0625 bits.

    Files of this type are read, multiplied and written again. Nothing can be quantized
    in it.

    !!! Example

        ```python
        q = eqquant.interop.open("model.gguf")["blk.0.ffn_up.weight"]
        ```

    ??? cite "Reference"

        `dequantize_row_iq3_xxs` of ggml.
    """

    type_size: ClassVar[int] = 98
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq3_xxs

    def split_blocks(self, blocks):
        step, index, rest = cut(blocks, (2, 64, 32))
        words, levels = words32(rest), self.codebook.levels(index)
        last = (levels == 7).astype(jnp.uint8)
        magnitudes = np.uint8(4) + np.uint8(8) * levels + np.uint8(2) * last
        signs = eight_signs(in_rows(fields(words, 7)))
        codes = signed(magnitudes.reshape(*signs.shape, 8), signs)
        return in_rows(codes), odd_multiples(step, words >> np.uint32(28), 1 / 4), None
