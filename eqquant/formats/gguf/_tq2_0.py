from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._blocks import absmax
from .._scale import reciprocal
from ._base import AbstractGGUFGrid, cut, planes, to_planes
from ._search import half_away


class TQ2_0(AbstractGGUFGrid):
    """GGUF's `TQ2_0`: -1, 0 or 1, times a scale in float16 for each 256 of them: the
    largest absolute value. Four codes to a byte: 2.0625 bits.

    This is for weights that are ternary already, with one absolute value in each block.
    Other weights lose most of their information: see [`eqquant.Ternary`][].

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.TQ2_0())
        ```

    ??? cite "Reference"

        `quantize_row_tq2_0_ref` and `dequantize_row_tq2_0` of ggml.
    """

    block_size: ClassVar[int] = 256
    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    levels: ClassVar[int] = 3
    radix: ClassVar[int] = 4
    type_size: ClassVar[int] = 66

    def fit(self, blocks, size):
        return absmax(blocks)

    def to_codes(self, blocks, size, scale):
        return (1 + half_away(blocks * reciprocal(scale))).astype(jnp.uint8)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 1

    def split_block(self, blocks):
        packed, scale = cut(blocks, (64, 2))
        return scale, planes(packed, 2, 32)

    def join_block(self, scale, codes):
        return jnp.concatenate([to_planes(codes, 2, 32), scale], axis=-1)
