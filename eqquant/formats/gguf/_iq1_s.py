from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from .._int8 import Int8
from ._base import cut, in_rows
from ._codebook import (
    AbstractCodebook,
    fields,
    in_eighths,
    odd_multiples,
    with_high,
    words16,
)
from ._codebooks import Codebook, iq1


class IQ1_S(AbstractCodebook):
    """GGUF's `IQ1_S`: each eight numbers are one of 2048 points whose coordinates are
    -1, 0 or 1. An eighth is added to those of each 32 numbers, or subtracted. Times a
    scale for as many: an odd multiple, of 3 bits, of one in float16 for each 256.
    1.5625 bits.

    Files of this type are read, multiplied and written again. Nothing can be quantized
    in it.

    !!! Example

        ```python
        q = eqquant.interop.open("model.gguf")["blk.0.ffn_up.weight"]
        ```

    ??? cite "Reference"

        `dequantize_row_iq1_s` of ggml.
    """

    type_size: ClassVar[int] = 50
    base: ClassVar[Int8] = Int8(32)
    codebook: ClassVar[Codebook] = iq1

    def split_blocks(self, blocks):
        step, low, rest = cut(blocks, (2, 32, 16))
        words = words16(rest)
        levels = self.codebook.levels(with_high(low, in_rows(fields(words, 3))))
        negative = jnp.repeat(words >> np.uint16(15), 4, axis=-1)
        codes = in_eighths(levels, negative.astype(bool))
        steps = (words >> np.uint16(12)) & np.uint16(7)
        return in_rows(codes), odd_multiples(step, steps, 1 / 8), None
