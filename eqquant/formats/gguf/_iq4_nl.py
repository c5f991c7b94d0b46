from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from .._adjustable import Parameters
from .._scale import all_within
from ._iq4 import iq4, points
from ._planes import AbstractGGUFPlanes
from ._search import PointSearch


class IQ4_NL(AbstractGGUFPlanes):
    """GGUF's `IQ4_NL`: sixteen points from -127 to 113, which are denser around zero,
    with a float16 scale for each 32 numbers. Zero is not among the points, but is exact
    in blocks of zeros. 4.5 bits.

    Of 16 scales for a block, of either sign, the one with the smallest sum of squared
    errors is taken, each weighted by the square of the number.

    ??? cite "Reference"

        `quantize_iq4_nl` and `dequantize_row_iq4_nl` of ggml.
    """

    block_size: ClassVar[int] = 32
    search: ClassVar[PointSearch] = points
    levels: ClassVar[int] = 16
    type_size: ClassVar[int] = 18
    width: ClassVar[int] = 16
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        # No scale in float16 fits larger numbers, and its reciprocal may be zero.
        held = all_within(blocks, np.float32(2.0**40))
        return jnp.where(held, self.search.best(blocks), jnp.inf)

    def to_codes(self, blocks, size, scale):
        return self.search.to_codes(blocks, scale)

    def to_points(self, codes):
        return iq4.to_points(codes)

    def candidates(self, blocks, size):
        around = iq4.candidates(blocks, size).scale
        return Parameters(jnp.concatenate([self.fit(blocks, size)[None], around]), None)
