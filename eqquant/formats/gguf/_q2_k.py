from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from .._bit_fields import plane_fields
from .._int import Int
from ._base import BlockFields, cut, planes, to_planes
from ._k import AbstractK, fit_ranges, from_ranges, small_blocks


class Q2_K(AbstractK):
    """GGUF's `Q2_K`: 2-bit integers from 0 to 3, times a scale and less an offset for
    each 16 of them. Those are 4-bit integers times two scales in float16 for each 256.
    2.625 bits.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.Q2_K())
        ```

    ??? cite "Reference"

        `quantize_row_q2_K_ref` and `dequantize_row_q2_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(2, 16, "minimum")
    type_size: ClassVar[int] = 84
    scale_at: ClassVar[int] = 80
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(16, 64, 2, 32),
        plane_fields(0, 16, 4, 16)[:16],
        plane_fields(0, 16, 4, 16)[16:],
    )

    def encode_blocks(self, blocks):
        x = small_blocks(blocks, 16)
        fitted = fit_ranges(x, jnp.abs(x), 3, 15, -0.5, 15, absolute=True)
        return self.join_blocks(*fitted)

    def join_blocks(self, codes, scales):
        four = scales["steps"] | scales["lows"] << np.uint8(4)
        parts = [four, to_planes(codes, 2, 32), scales["step"], scales["low"]]
        return jnp.concatenate(parts, axis=-1)

    def split_blocks(self, blocks):
        scales, codes, step, low = cut(blocks, (16, 64, 2, 2))
        steps, lows = scales & np.uint8(15), scales >> np.uint8(4)
        return planes(codes, 2, 32), *from_ranges(step, low, steps, lows)
