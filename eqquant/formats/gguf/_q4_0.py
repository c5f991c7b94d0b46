from typing import ClassVar

import jax.numpy as jnp

from .._scale import reciprocal
from ._planes import AbstractGGUFPlanes
from ._search import half_up, signed_largest


class Q4_0(AbstractGGUFPlanes):
    """GGUF's `Q4_0`: 4-bit integers from -8 to 7, with a float16 scale for each 32
    numbers. The number with the largest absolute value becomes -8 times the scale, and
    is exact up to the rounding of the scale. 4.5 bits.

    ??? cite "Reference"

        `quantize_row_q4_0_ref` and `dequantize_row_q4_0` of ggml.
    """

    block_size: ClassVar[int] = 32
    levels: ClassVar[int] = 16
    type_size: ClassVar[int] = 18
    width: ClassVar[int] = 16
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        return signed_largest(blocks) / -8

    def to_codes(self, blocks, size, scale):
        return half_up(blocks * reciprocal(scale), 8, 16)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 8
