from typing import Any, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._base import AbstractScaled
from ._bits import number_of_codes, pack_bits, unpack_bits
from ._blocks import merge, split, spread
from ._scale import (
    as_scale_dtype,
    divided,
    from_bits,
    held,
    in_units,
    nearest_scale,
    poison,
    step,
    to_bits,
)


class Int(AbstractScaled):
    """Integers of 2 to 8 bits, with no bits between them: the first code in the lowest
    bits of the first byte. Rounds half to even.

    - `offset`: what a code `q` from 0 to `2**bits - 1` stands for, of a block with the
      scale `s`.

        - None: `(q - 2**(bits - 1)) * s`. The largest absolute value of the block is
          `(2**bits - 1) / 2` times the scale, half a step from any code. Nine times of
          ten it comes back that much lower: in blocks of 32 normal numbers, the mean
          error is -4 % of the root mean square of the errors, in blocks of 64 -2 %.
          (This is the rule of torchao. `Int4` and `Int8` have no such bias.)
        - `"zero_point"`: `(q - z) * s`, with an integer `z`. The range of the block,
          widened to include zero, is `2**bits - 1` times the scale. Zero is exact.
        - `"minimum"`: `q * s + m`, with the least number `m` of the block, in the dtype
          of the scale. The range is `2**bits - 1` times the scale.

    - `ordered`: whether the block of each position is stored, for all rows together. So
      it need not be one after another, as GPTQ leaves them that takes the columns in
      the order of their activations.

    [`eqquant.Int4`][] and [`eqquant.Int8`][] are such integers, too, with kernels that
    these do not have.

    ??? cite "Reference"

        Integer Quantization for Deep Learning Inference: Principles and Empirical
        Evaluation. Wu et al., 2020. Section 3.

        GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
        Transformers. Frantar et al., 2023. Section 3.
    """

    bits: int = eqx.field(default=4, static=True)  # pyright: ignore
    block_size: int | None = eqx.field(default=64, static=True)
    offset: Literal["zero_point", "minimum"] | None = eqx.field(
        default=None, static=True
    )
    ordered: bool = eqx.field(default=False, static=True)
    scale_dtype: Any = eqx.field(
        default=jnp.float32, static=True, converter=as_scale_dtype
    )

    def __check_init__(self):
        if isinstance(self.bits, bool) or not isinstance(self.bits, int | np.integer):
            raise TypeError(
                "`bits` should be an integer from 2 to 8. Got "
                f"{self.bits!r}, of type {type(self.bits).__name__}."
            )
        if not 2 <= self.bits <= 8:
            raise ValueError(f"`bits` should be from 2 to 8. Got {self.bits}.")
        if self.offset not in (None, "zero_point", "minimum"):
            raise ValueError(
                "`offset` should be None, 'zero_point' or 'minimum'. Got "
                f"{self.offset!r}."
            )

    @property
    def splits(self) -> bool:
        return not self.ordered

    def encode(self, w, scale=None):
        blocks, size = split(w, self.block_size)
        most, half = 2**self.bits - 1, 2 ** (self.bits - 1)
        low, high = self._range(blocks, size)
        if scale is not None:
            scale = scale[..., None]
        elif self.offset is None:
            scale = divided(jnp.maximum(high, -low), most / 2)
        else:
            scale = step(low, high, most)
        bits = to_bits(poison(scale, blocks), self.scale_dtype)
        rounded = from_bits(bits, self.scale_dtype)
        stored = {}
        if self.offset is None:
            codes = jnp.round(in_units(blocks, rounded)) + half
            ends = (half * rounded,)
        elif self.offset == "zero_point":
            zero = -divided(low, jnp.where(rounded == 0, 1, rounded))
            zero = jnp.clip(jnp.round(zero), 0, most)
            codes = jnp.round(in_units(blocks, rounded)) + zero
            ends = (zero * rounded, (most - zero) * rounded)
            stored["zero_point"] = zero[..., 0].astype(jnp.uint8)
        else:
            low_bits = to_bits(nearest_scale(low, self.scale_dtype), self.scale_dtype)
            low = from_bits(low_bits, self.scale_dtype)
            # Half of each: their difference may be beyond float32.
            codes = jnp.round(in_units(blocks / 2 - low / 2, rounded / 2))
            ends = (most * rounded, low, most * rounded + low)
            stored["minimum"] = low_bits[..., 0]
        bits = held(bits, self.scale_dtype, ends)
        codes = jnp.clip(codes, 0, most).astype(jnp.uint8)
        codes = pack_bits(merge(codes, w.shape[-1]), self.bits)
        if self.ordered:
            stored["block"] = self._in_order(w.shape)
        return {"codes": codes, "scale": bits[..., 0], **stored}

    def decode(self, stored, tail):
        codes = unpack_bits(stored["codes"], self.bits, tail).astype(jnp.float32)
        scale = self._spread(self.scales(stored, tail), stored, codes)
        if self.offset is None:
            return (codes - np.float32(2 ** (self.bits - 1))) * scale
        if self.offset == "zero_point":
            zero = stored["zero_point"].astype(jnp.float32)
            return (codes - self._spread(zero, stored, codes)) * scale
        low = from_bits(stored["minimum"], self.scale_dtype)
        return codes * scale + self._spread(low, stored, codes)

    def scales(self, stored, tail):
        return from_bits(stored["scale"], self.scale_dtype)

    def shape(self, stored, tail):
        *lead, j = stored["codes"].shape
        return (*lead, number_of_codes(j, self.bits) - tail)

    def _range(self, blocks, size):
        if self.offset == "minimum":
            # Of what the block really has: it need not include zero.
            missing = np.arange(blocks.shape[-1]) >= np.maximum(size, 1)
            low = jnp.where(missing, jnp.inf, blocks)
            high = jnp.where(missing, -jnp.inf, blocks)
        else:
            low, high = jnp.minimum(blocks, 0), jnp.maximum(blocks, 0)
        low = jnp.min(low, axis=-1, keepdims=True, initial=jnp.inf)
        high = jnp.max(high, axis=-1, keepdims=True, initial=-jnp.inf)
        return low, high

    def _in_order(self, shape):
        *lead, k = shape
        order = np.arange(k, dtype=np.int32) // (self.block_size or max(1, k))
        lead = (*lead[:-1], 1) if lead else ()
        return jnp.broadcast_to(order, (*lead, k))

    def _spread(self, of_blocks, stored, codes):
        if not self.ordered:
            return spread(of_blocks, self.block_size, codes.shape[-1])
        block = jnp.broadcast_to(stored["block"], codes.shape)
        return jnp.take_along_axis(of_blocks, block, axis=-1)
