from typing import ClassVar

import jax.numpy as jnp

from .._blocks import absmax
from .._scale import reciprocal
from ._planes import AbstractGGUFPlanes
from ._search import half_away


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
