from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._bit_fields import Code, plane_fields
from .._scale import reciprocal
from ._base import AbstractGGUFGrid, cut, planes, to_planes
from ._search import half_up, signed_largest


class Q4_0(AbstractGGUFGrid):
    """GGUF's `Q4_0`: 4-bit integers from -8 to 7, times a scale in float16 for each 32
    of them. The number of the largest absolute value is -8 times the scale:
    exact, but for the rounding of the scale. 4.5 bits.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.Q4_0())
        ```

    ??? cite "Reference"

        `quantize_row_q4_0_ref` and `dequantize_row_q4_0` of ggml.
    """

    block_size: ClassVar[int] = 32
    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    levels: ClassVar[int] = 16
    type_size: ClassVar[int] = 18
    scale_at: ClassVar[int] = 0
    fields: ClassVar[tuple[Code, ...]] = plane_fields(2, 16, 4, 16)
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        return signed_largest(blocks) / -8

    def to_codes(self, blocks, size, scale):
        return half_up(blocks * reciprocal(scale), 8, 16)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 8

    def split_block(self, blocks):
        scale, packed = cut(blocks, (2, 16))
        return scale, planes(packed, 4, 16)

    def join_block(self, scale, codes):
        return jnp.concatenate([scale, to_planes(codes, 4, 16)], axis=-1)
