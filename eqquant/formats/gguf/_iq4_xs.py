from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from .._bit_fields import joined, plane_fields
from .._grid import AbstractGrid
from ._base import BlockFields, cut, half, planes, to_planes
from ._iq4 import best_iq4_scale, iq4, iq4_codes
from ._k import AbstractK, large_block, shared_scales, small_blocks


class IQ4_XS(AbstractK):
    """GGUF's `IQ4_XS`: the points of [`eqquant.formats.IQ4_NL`][], times a scale for
    each 32 of them. Those are 6-bit integers, which may be negative, times a scale in
    float16 for each 256. 4.25 bits.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.IQ4_XS())
        ```

    ??? cite "Reference"

        `quantize_iq4_xs` and `dequantize_row_iq4_xs` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[AbstractGrid] = iq4
    type_size: ClassVar[int] = 136
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 1
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(8, 128, 4, 16),
        joined(plane_fields(4, 4, 4, 1), plane_fields(2, 2, 2, 1, at=4)),
        zero=32,
    )

    def encode_blocks(self, blocks):
        x = small_blocks(blocks, 32)
        scales, scale = shared_scales(x, best_iq4_scale, 32)
        codes = large_block(iq4_codes(x, scale))
        return self.join_blocks(codes, scales)

    def join_blocks(self, codes, scales):
        steps = (scales["steps"] + 32).astype(jnp.uint8)
        parts = [
            scales["step"],
            to_planes(steps >> np.uint8(4), 2, 1),
            to_planes(steps & np.uint8(15), 4, 1),
            to_planes(codes, 4, 16),
        ]
        return jnp.concatenate(parts, axis=-1)

    def split_blocks(self, blocks):
        step, high, low, codes = cut(blocks, (2, 2, 4, 128))
        steps = planes(high, 2, 1) << np.uint8(4) | planes(low, 4, 1)
        scale = half(step) * (steps.astype(jnp.float32) - 32)
        return planes(codes, 4, 16), scale, None
