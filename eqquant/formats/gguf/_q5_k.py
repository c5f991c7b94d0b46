from typing import ClassVar

import jax.numpy as jnp
import numpy as np

from .._bit_fields import joined, plane_fields
from .._int import Int
from ._base import BlockFields, cut, planes, to_planes
from ._k import (
    AbstractK,
    fit_ranges,
    from_ranges,
    join_scales,
    scale_fields,
    small_blocks,
    split_scales,
)


class Q5_K(AbstractK):
    """GGUF's `Q5_K`: 5-bit integers from 0 to 31, times a scale and less an offset
    for each 32 of them. Those are 6-bit integers times two scales in float16 for each
    256. 5.5 bits.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.Q5_K())
        ```

    ??? cite "Reference"

        `quantize_row_q5_K_ref` and `dequantize_row_q5_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(5, 32, "minimum")
    type_size: ClassVar[int] = 176
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(
        joined(plane_fields(48, 128, 4, 32), plane_fields(16, 32, 1, 32, at=4)),
        *scale_fields(4),
    )

    def encode_blocks(self, blocks):
        x = small_blocks(blocks, 32)
        weights = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) + jnp.abs(x)
        fitted = fit_ranges(x, weights, 31, 63, -0.5, 15, absolute=False)
        return self.join_blocks(*fitted)

    def join_blocks(self, codes, scales):
        six = join_scales(scales["steps"], scales["lows"])
        high_bits = to_planes(codes >> np.uint8(4), 1, 32)
        low_bits = to_planes(codes & np.uint8(15), 4, 32)
        parts = [scales["step"], scales["low"], six, high_bits, low_bits]
        return jnp.concatenate(parts, axis=-1)

    def split_blocks(self, blocks):
        step, low, scales, high_bits, low_bits = cut(blocks, (2, 2, 12, 32, 128))
        codes = planes(high_bits, 1, 32) << np.uint8(4) | planes(low_bits, 4, 32)
        return codes, *from_ranges(step, low, *split_scales(scales))
