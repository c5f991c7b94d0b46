from typing import ClassVar

import jax.numpy as jnp

from .._blocks import steady_sum
from .._scale import nearest_scale
from ._planes import AbstractGGUFPlanes


class Q1_0(AbstractGGUFPlanes):
    """GGUF's `Q1_0`: the sign of each number (positive for zero) times the mean
    absolute value of each 128 numbers, in float16. 1.125 bits.

    This is for weights that were trained to be binary. Most of the information in other
    weights is lost.

    ??? cite "Reference"

        `quantize_row_q1_0_ref` and `dequantize_row_q1_0` of ggml.
    """

    block_size: ClassVar[int] = 128
    levels: ClassVar[int] = 2
    type_size: ClassVar[int] = 18
    width: ClassVar[int] = 1

    def fit(self, blocks, size):
        # Divide first: a sum of large numbers may overflow.
        mean = steady_sum(jnp.abs(blocks) / jnp.maximum(size, 1), -1)
        return nearest_scale(mean, self.scale_dtype)

    def to_codes(self, blocks, size, scale):
        return (blocks >= 0).astype(jnp.uint8)

    def to_points(self, codes):
        return 2 * codes.astype(jnp.float32) - 1
