from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from .._bit_fields import plane_fields
from .._blocks import absmax, steady_sum
from .._scale import nearest_scale, reciprocal
from ._base import AbstractGGUFGrid
from ._search import half_away


class AbstractGGUFPlanes(AbstractGGUFGrid):
    """A type whose blocks are the scale and then the codes, packed as by `planes`.

    - `width`: the number of bytes in which codes are side by side.
    """

    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    scale_at: ClassVar[int] = 0
    width: eqx.AbstractClassVar[int]

    @property
    def fields(self):
        return plane_fields(2, self.type_size - 2, int(self.bits), self.width)


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


class Q2_0(AbstractGGUFPlanes):
    """GGUF's `Q2_0`: -1, 0, 1 or 2, with a float16 scale for each 64 numbers: the
    largest absolute value. So no number is encoded as twice the scale, although files
    may contain such numbers. 2.25 bits.

    This is for weights that are ternary already, with one absolute value in each block.
    Other weights lose most of their information: see [`eqquant.Ternary`][].

    ??? cite "Reference"

        `quantize_row_q2_0_ref` and `dequantize_row_q2_0` of ggml.
    """

    block_size: ClassVar[int] = 64
    levels: ClassVar[int] = 4
    type_size: ClassVar[int] = 18
    width: ClassVar[int] = 1
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        return absmax(blocks)

    def to_codes(self, blocks, size, scale):
        codes = 1 + half_away(blocks * reciprocal(scale))
        return jnp.clip(codes, 0, 3).astype(jnp.uint8)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 1
