from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._bit_fields import joined, plane_fields
from .._int import Int
from ._base import BlockFields, cut, half, planes, to_planes
from ._k import AbstractK, fit_scales, small_blocks


class Q6_K(AbstractK):
    """GGUF's `Q6_K`: 6-bit integers from -32 to 31, times a scale for each 16 of them.
    Those are 8-bit integers, which may be negative, times a scale in float16 for each
    256. 6.5625 bits.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.Q6_K())
        ```

    ??? cite "Reference"

        `quantize_row_q6_K_ref` and `dequantize_row_q6_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(6, 16)
    type_size: ClassVar[int] = 210
    scale_at: ClassVar[int] = 208
    halves: ClassVar[int] = 1
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(0, 128, 4, 64), plane_fields(128, 64, 2, 32, at=4)),
        plane_fields(192, 16, 8, 16),
        signed=True,
    )

    def encode_blocks(self, blocks):
        return self.join_blocks(*fit_scales(small_blocks(blocks, 16), 32, 128))

    def join_blocks(self, codes, scales):
        parts = [
            to_planes(codes & np.uint8(15), 4, 64),
            to_planes(codes >> np.uint8(4), 2, 32),
            lax.bitcast_convert_type(scales["steps"].astype(jnp.int8), jnp.uint8),
            scales["step"],
        ]
        return jnp.concatenate(parts, axis=-1)

    def split_blocks(self, blocks):
        low, high, steps, step = cut(blocks, (128, 64, 16, 2))
        codes = planes(high, 2, 32) << np.uint8(4) | planes(low, 4, 64)
        steps = lax.bitcast_convert_type(steps, jnp.int8).astype(jnp.float32)
        return codes, half(step) * steps, None
