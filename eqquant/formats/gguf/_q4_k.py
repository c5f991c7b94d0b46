from typing import ClassVar

import jax.numpy as jnp

from .._bit_fields import plane_fields
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


class Q4_K(AbstractK):
    """GGUF's `Q4_K`: 4-bit integers from 0 to 15, times a scale and less an offset
    for each 32 of them. Those are 6-bit integers times two scales in float16 for each
    256. 4.5 bits.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.Q4_K())
        ```

    ??? cite "Reference"

        `quantize_row_q4_K_ref` and `dequantize_row_q4_K` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[Int] = Int(4, 32, "minimum")
    type_size: ClassVar[int] = 144
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 2
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(16, 128, 4, 32), *scale_fields(4)
    )

    def encode_blocks(self, blocks):
        x = small_blocks(blocks, 32)
        weights = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True)) + jnp.abs(x)
        fitted = fit_ranges(x, weights, 15, 63, -1.0, 20, absolute=False)
        return self.join_blocks(*fitted)

    def join_blocks(self, codes, scales):
        six = join_scales(scales["steps"], scales["lows"])
        parts = [scales["step"], scales["low"], six, to_planes(codes, 4, 32)]
        return jnp.concatenate(parts, axis=-1)

    def split_blocks(self, blocks):
        step, low, scales, codes = cut(blocks, (2, 2, 12, 128))
        return planes(codes, 4, 32), *from_ranges(step, low, *split_scales(scales))
