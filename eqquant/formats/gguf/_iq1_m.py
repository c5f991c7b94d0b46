from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._int8 import Int8
from ._base import cut, in_rows, planes
from ._codebook import (
    AbstractCodebook,
    fields,
    in_eighths,
    odd_multiples,
    with_high,
    words16,
)
from ._codebooks import Codebook, iq1


class IQ1_M(AbstractCodebook):
    """GGUF's `IQ1_M`: each eight numbers are one of 2048 points whose coordinates are
    -1, 0 or 1, to all of which an eighth is added, or subtracted. Times a scale for
    each 16 numbers: an odd multiple, of 3 bits, of one in float16 for each 256. 1.75
    bits.

    Files of this type are read, multiplied and written again. Nothing can be quantized
    in it.

    !!! Example

        ```python
        q = eqquant.interop.open("model.gguf")["blk.0.ffn_up.weight"]
        ```

    ??? cite "Reference"

        `dequantize_row_iq1_m` of ggml.
    """

    type_size: ClassVar[int] = 56
    base: ClassVar[Int8] = Int8(16)
    codebook: ClassVar[Codebook] = iq1

    def split_blocks(self, blocks):
        low, rest, packed = cut(blocks, (32, 16, 8))
        high, words = planes(rest, 4, 1), words16(packed)
        levels = self.codebook.levels(with_high(low, high & np.uint8(7)))
        codes = in_eighths(levels, (high >> np.uint8(3)).astype(bool))
        # The bits of the scale of the block are above the others, four in each word.
        shifts = np.arange(0, 16, 4, dtype=np.uint16)
        shifts = shifts.reshape((1,) * (words.ndim - 1) + (4,))
        step = jnp.sum((words >> np.uint16(12)) << shifts, axis=-1, dtype=jnp.uint16)
        step = lax.bitcast_convert_type(step, jnp.uint8)
        steps = in_rows(fields(words, 3))
        return in_rows(codes), odd_multiples(step, steps, 1 / 8), None
