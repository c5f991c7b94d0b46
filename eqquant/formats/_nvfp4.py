from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from ._adjustable import AbstractAdjustable, Parameters
from ._base import AbstractComposite, ByteScales
from ._blocks import absmax, merge, split
from ._fp4 import FP4, largest_e2m1, to_e2m1
from ._fp8 import as_float8, from_float8, largest_float8, to_float8
from ._rows import of_all_rows
from ._scale import divided, from_bits, poison, to_bits


_e4m3 = as_float8("e4m3")
_largest = largest_float8(_e4m3)
# The smallest normal scale. Smaller ones would have few bits.
_smallest = 2.0**-6
_ends = np.array([_smallest, _largest], _e4m3).view(np.uint8).astype(np.int32)
# The steps up or down in `e4m3` that methods try for a scale: from two fifths of it to
# a scale with which the largest number of a block is below 4.
_around = np.array([0, *range(1, 7), *range(-1, -11, -1)], np.int32)


class NVFP4(AbstractComposite, AbstractAdjustable):
    """4-bit floating-point numbers, `e2m1`, with a scale for each 16 numbers. This
    scale is an 8-bit floating-point number, `e4m3`, times a scale of the whole matrix:
    its largest absolute value divided by `6 * 448`. Rounds half to even. 4.5 bits.

    The scale of a block is at least `2**-6` times that of the matrix. So blocks whose
    numbers are smaller than the largest one by four orders of magnitude lose precision.

    - `inverse`: whether to store the reciprocal of the scale of the matrix, as
      compressed-tensors does.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.NVFP4())
        ```

    ??? cite "Reference"

        Pretraining Large Language Models with NVFP4. NVIDIA, 2025. Section 2.
    """

    inverse: bool = eqx.field(default=False, static=True)
    by_element: ClassVar[bool] = True
    block_size: ClassVar[int] = 16
    base: ClassVar[FP4] = FP4(16)

    def encode(self, w, scale=None):
        blocks, _ = split(w, self.block_size)
        if scale is None:
            largest = absmax(blocks)
            scale = divided(largest, largest_e2m1)
            whole = _whole(largest, largest_e2m1 * _largest)
        else:
            scale = scale[..., None]
            whole = _whole(scale, _largest)
        unit = _scale_codes(divided(scale, whole))
        inverse = jnp.broadcast_to(1 / whole, unit.shape)
        inverse = divided(inverse, from_float8(unit, _e4m3))
        codes = merge(to_e2m1(blocks * inverse), w.shape[-1])
        return {
            "codes": self.base.pack(codes),
            "scale": unit[..., 0],
            "global_scale": self._global_scale(whole, blocks),
        }

    def _global_scale(self, whole, blocks):
        found = poison(1 / whole if self.inverse else whole, blocks)
        return to_bits(found, self.scale_dtype)[..., 0]

    def unit(self, w):
        # The same as in `encode`: so the stored form of a row depends on no other row.
        blocks, _ = split(w, self.block_size)
        whole = _whole(absmax(blocks), largest_e2m1 * _largest)
        return whole[..., 0], {"global_scale": self._global_scale(whole, blocks)}

    @property
    def grid(self):
        return self.base

    def candidates(self, blocks, size):
        usual = _scale_codes(divided(absmax(blocks), largest_e2m1)).astype(jnp.int32)
        # (Positive codes are in the order of their values.)
        codes = usual[None] + _around.reshape(-1, *(1,) * blocks.ndim)
        codes = jnp.clip(codes, *_ends).astype(jnp.uint8)
        return Parameters(from_float8(codes, _e4m3), None)

    def held(self, parameters):
        return self.settled(parameters)[1]

    def settled(self, parameters):
        codes = _scale_codes(parameters.scale)
        return {"scale": codes}, Parameters(from_float8(codes, _e4m3), None)

    def write(self, codes, settled):
        return {"codes": self.base.pack(codes), **settled}

    def flat(self, stored, tail):
        # Without the checks of `to_bits`, since this runs for each product.
        scale = lax.bitcast_convert_type(self.scales(stored, tail), jnp.uint32)
        return {"codes": stored["codes"], "scale": scale}

    def byte_scales(self, stored):
        # (Rows joined from several matrices have their own `global_scale`.)
        if stored["global_scale"].size != 1:
            return None
        return ByteScales(_e4m3, "global_scale", self.inverse)

    def scales(self, stored, tail):
        scale = from_float8(stored["scale"], _e4m3)
        whole = from_bits(stored["global_scale"], self.scale_dtype)
        return divided(scale, whole) if self.inverse else scale * whole


def _scale_codes(scale: Float[Array, "*s"]) -> UInt8[Array, "*s"]:
    return to_float8(jnp.clip(scale, _smallest, _largest), _e4m3)


def _whole(x: Float[Array, "*b g 1"], most: float) -> Float[Array, "*_ 1 1"]:
    # Returns the scale of a matrix that makes the largest of all numbers `most`.
    whole = divided(_largest_of_all(x), most)
    return jnp.maximum(whole, jnp.finfo(jnp.float32).tiny)


def _largest_of_all(x: Float[Array, "*b g 1"]) -> Float[Array, "*_ 1 1"]:
    x = jnp.max(x, axis=-2, keepdims=True, initial=0)
    # Reduces a matrix, whose blocks are `n g s`, or a vector, `g s`.
    if x.ndim > 2:
        x = jnp.max(of_all_rows(x), axis=-3, keepdims=True, initial=0)
    return x
