from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._base import AbstractScaled
from ._blocks import merge, split, spread
from ._packing import pack, unpack
from ._scale import as_scale_dtype, from_bits, held, poison, reciprocal, step, to_bits


class Int4(AbstractScaled):
    """4-bit integers. Two codes to a byte, the first in the low nibble. Rounds half to
    even.

    - symmetric: from -7 to 7, times the largest absolute value of the block divided
      by 7. Stored with 8 added.
    - affine: from 0 to 15, less a zero-point that is itself such an integer, times the
      range of the block divided by 15. The range is widened to include zero, which is
      exact.

    ??? cite "Reference"

        Integer Quantization for Deep Learning Inference: Principles and Empirical
        Evaluation. Wu et al., 2020. Section 3.
    """

    block_size: int | None = eqx.field(default=64, static=True)
    symmetric: bool = eqx.field(default=True, static=True)
    scale_dtype: Any = eqx.field(
        default=jnp.float32, static=True, converter=as_scale_dtype
    )
    bits: ClassVar[float] = 4.0
    row_axis: ClassVar[int] = -1

    def encode(self, w, scale=None):
        blocks, _ = split(w, self.block_size)
        low = jnp.min(blocks, axis=-1, keepdims=True, initial=0)
        high = jnp.max(blocks, axis=-1, keepdims=True, initial=0)
        if scale is not None:
            scale = scale[..., None]
        elif self.symmetric:
            scale = jnp.maximum(high, -low) / 7
        else:
            scale = step(low, high, 15)
        bits = to_bits(poison(scale, blocks), self.scale_dtype)
        scale = from_bits(bits, self.scale_dtype)
        codes = jnp.round(blocks * reciprocal(scale))
        stored = {}
        if self.symmetric:
            codes = jnp.clip(codes, -7, 7) + 8
        else:
            zero = jnp.clip(jnp.round(-low * reciprocal(scale)), 0, 15)
            codes = jnp.clip(codes + zero, 0, 15)
            bits = held(bits, self.scale_dtype, (zero * scale, (15 - zero) * scale))
            stored["zero_point"] = zero[..., 0].astype(jnp.uint8)
        codes = merge(codes.astype(jnp.uint8), w.shape[-1])
        return {"codes": pack(codes, 16), "scale": bits[..., 0], **stored}

    def decode(self, stored, tail):
        codes = unpack(stored["codes"], 16, tail).astype(jnp.float32)
        k = codes.shape[-1]
        if self.symmetric:
            zero = np.float32(8)
        else:
            zero = stored["zero_point"].astype(jnp.float32)
            zero = spread(zero, self.block_size, k)
        return (codes - zero) * spread(self.scales(stored, tail), self.block_size, k)

    def scales(self, stored, tail):
        return from_bits(stored["scale"], self.scale_dtype)

    def shape(self, stored, tail):
        *lead, j = stored["codes"].shape
        return (*lead, 2 * j - tail)
