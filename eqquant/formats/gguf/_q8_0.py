from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._bit_fields import Code, plane_fields
from .._blocks import absmax
from .._scale import divided, reciprocal
from ._base import AbstractGGUFGrid
from ._search import half_away


class Q8_0(AbstractGGUFGrid):
    """GGUF's `Q8_0`: 8-bit integers, with a float16 scale for each 32 numbers: the
    largest absolute value divided by 127. Rounds half away from zero. 8.5 bits.

    ??? cite "Reference"

        `quantize_row_q8_0_ref` and `dequantize_row_q8_0` of ggml.
    """

    block_size: ClassVar[int] = 32
    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    levels: ClassVar[int] = 256
    type_size: ClassVar[int] = 34
    scale_at: ClassVar[int] = 0
    signed: ClassVar[bool] = True
    fields: ClassVar[tuple[Code, ...]] = plane_fields(2, 32, 8, 32)

    def fit(self, blocks, size):
        largest = absmax(blocks)
        return divided(largest, 127)

    def to_codes(self, blocks, size, scale):
        codes = half_away(blocks * reciprocal(scale))
        return jnp.clip(codes, -127, 127).astype(jnp.int8)

    def to_points(self, codes):
        return codes.astype(jnp.float32)
