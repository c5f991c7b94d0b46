from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from .._bit_fields import joined, plane_fields
from .._int import Int
from ._base import BlockFields, cut, half, planes, to_planes
from ._k import AbstractK, fit_scales, small_blocks


class Q3_K(AbstractK):
    """GGUF's `Q3_K`: 3-bit integers from -4 to 3, times a scale for each 16 of them.
    Those are 6-bit integers, which may be negative, times a scale in float16 for each
    256. 3.4375 bits.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.Q3_K())
        ```

    ??? cite "Reference"

        `quantize_row_q3_K_ref` and `dequantize_row_q3_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(3, 16)
    type_size: ClassVar[int] = 110
    scale_at: ClassVar[int] = 108
    halves: ClassVar[int] = 1
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(32, 64, 2, 32), plane_fields(0, 32, 1, 32, at=2)),
        joined(plane_fields(96, 8, 4, 8), plane_fields(104, 4, 2, 4, at=4)),
        zero=32,
    )

    def encode_blocks(self, blocks):
        return self.join_blocks(*fit_scales(small_blocks(blocks, 16), 4, 32))

    def join_blocks(self, codes, scales):
        steps = (scales["steps"] + 32).astype(jnp.uint8)
        parts = [
            to_planes(codes >> np.uint8(2), 1, 32),
            to_planes(codes & np.uint8(3), 2, 32),
            to_planes(steps & np.uint8(15), 4, 8),
            to_planes(steps >> np.uint8(4), 2, 4),
            scales["step"],
        ]
        return jnp.concatenate(parts, axis=-1)

    def split_blocks(self, blocks):
        high, low, low_scales, high_scales, step = cut(blocks, (32, 64, 8, 4, 2))
        codes = planes(high, 1, 32) << np.uint8(2) | planes(low, 2, 32)
        steps = planes(high_scales, 2, 4) << np.uint8(4) | planes(low_scales, 4, 8)
        return codes, half(step) * (steps.astype(jnp.float32) - 32), None
