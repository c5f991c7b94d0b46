from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._grid import AbstractGrid
from ._scale import reciprocal, scale_dtype_field, step


class Int4(AbstractGrid):
    """4-bit integers. Two codes to a byte, the first in the low nibble. Rounds half to
    even.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `symmetric`: integers from -7 to 7, times the largest absolute value of the block
      divided by 7. Zero and both of these extremes are exact. Otherwise integers from 0
      to 15, less a zero-point that is itself such an integer, times the range of the
      block divided by 15. The range is widened to include zero, which is exact.
    - `scale_dtype`: float32, bfloat16 or float16.

    Use this for your own weights: it has no bias, and its kernels are fast.
    [`eqquant.Int`][] with 4 bits is for weights that other libraries have quantized. It
    packs the same bytes, but uses all 16 levels, from -8 to 7, none of which is the
    largest absolute value of a block.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Int4(128))
        q = eqquant.quantize(w, eqquant.Int4(symmetric=False))
        ```

    ??? cite "Reference"

        Integer Quantization for Deep Learning Inference: Principles and Empirical
        Evaluation. Wu et al., 2020. Section 3.
    """

    block_size: int | None = eqx.field(default=64, static=True)
    symmetric: bool = eqx.field(default=True, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 16

    @property
    def offset(self) -> Literal["zero_point"] | None:
        return None if self.symmetric else "zero_point"

    def fit(self, blocks, size):
        low = jnp.min(blocks, axis=-1, keepdims=True, initial=0)
        high = jnp.max(blocks, axis=-1, keepdims=True, initial=0)
        return jnp.maximum(high, -low) / 7 if self.symmetric else step(low, high, 15)

    def fit_offset(self, blocks, size, scale):
        low = jnp.min(blocks, axis=-1, keepdims=True, initial=0)
        return jnp.clip(jnp.round(-low * reciprocal(scale)), 0, 15)

    def to_codes(self, blocks, size, scale):
        codes = jnp.round(blocks * reciprocal(scale))
        if self.symmetric:
            codes = (jnp.clip(codes, -7, 7) + 8).astype(jnp.uint8)
        return codes

    def to_points(self, codes):
        return codes.astype(jnp.float32) - np.float32(8 if self.symmetric else 0)

    def ends(self, scale, offset):
        if self.symmetric:
            return ()
        return [self.numbers(jnp.float32(end), scale, offset) for end in (0, 15)]
