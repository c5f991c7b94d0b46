import abc
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, UInt8

from ._adjustable import AbstractAdjustable, Parameters
from ._base import AbstractComposite, ByteScales
from ._blocks import absmax, merge, split, spread
from ._grid import AbstractGrid
from ._scale import poison


_nan = 255
_subnormal = np.uint16(2**6)  # 2**-127, in bfloat16.
_up = 64
# Offsets that methods may try for the exponent that `encode` finds.
_around = np.array([0, 1, -1], np.int32)


class AbstractMX(AbstractComposite, AbstractAdjustable):
    """Blocks of 32 numbers that share a power of two, `2**(e - 127)`. `e` is stored, or
    255 for NaN. The exponent is that of the largest number of the block, less
    `largest_power`. So the largest number may exceed the largest element; it saturates.

    ??? cite "Reference"

        OCP Microscaling Formats (MX) Specification, version 1.0. Sections 5 and 6.3.
    """

    by_element: ClassVar[bool] = True
    block_size: ClassVar[int] = 32

    @property
    @abc.abstractmethod
    def base(self) -> AbstractGrid:
        """The elements as a grid with bfloat16 scales."""

    @property
    @abc.abstractmethod
    def largest_power(self) -> int:
        """The exponent of the largest element that is a power of two."""

    @abc.abstractmethod
    def to_codes(
        self,
        blocks: Float[Array, "*b g s"],
        size: Float[np.ndarray, "*_ g 1"],
        scale: Float[Array, "*b g 1"],
    ) -> Integer[Array, "*b g s"]:
        """Returns the code of the element that each number is rounded to."""

    def encode(self, w, scale=None):
        blocks, size = split(w, self.block_size)
        if scale is None:
            largest = absmax(blocks)
            exponent = _exponent(largest) - self.largest_power
        else:
            exponent = _exponent(scale[..., None])
        # A subnormal scale would be flushed to zero; only blocks of zeros may have one.
        least = jnp.any(blocks != 0, axis=-1, keepdims=True).astype(jnp.int32)
        exponent = jnp.clip(exponent, least, _nan - 1).astype(jnp.uint8)
        scale = _power(jnp.maximum(exponent, 1))
        codes = merge(self.to_codes(blocks, size, scale), w.shape[-1])
        finite = jnp.isfinite(poison(jnp.zeros_like(scale), blocks))
        exponent = jnp.where(finite, exponent, np.uint8(_nan))
        return {"codes": self.base.pack(codes), "scale": exponent[..., 0]}

    @property
    def grid(self):
        return self.base

    def candidates(self, blocks, size):
        usual = _exponent(absmax(blocks)) - self.largest_power
        exponent = usual[None] + _around.reshape(-1, *(1,) * blocks.ndim)
        exponent = jnp.clip(exponent, 1, _nan - 1).astype(jnp.uint8)
        return Parameters(_power(exponent), None)

    def held(self, parameters):
        return Parameters(_power(_nearest_exponent(parameters.scale)), None)

    def settled(self, parameters):
        exponent = _nearest_exponent(parameters.scale)
        return {"scale": exponent}, Parameters(_power(exponent), None)

    def write(self, codes, settled):
        return {"codes": self.base.pack(codes), **settled}

    def decode(self, stored, tail):
        codes = self.base.unpack(stored["codes"], tail)
        exponent = spread(stored["scale"], self.block_size, codes.shape[-1])
        return _scaled(self.base.to_points(codes), exponent)

    def flat(self, stored, tail):
        # In bfloat16, which has the same powers of two in 16 bits.
        exponent = stored["scale"].astype(jnp.uint16)
        bits = jnp.where(exponent == 0, _subnormal, exponent << np.uint16(7))
        bits = jnp.where(exponent == _nan, np.uint16(0x7FC0), bits)
        return stored | {"scale": bits}

    def byte_scales(self, stored):
        return ByteScales(jnp.dtype(jnp.float8_e8m0fnu))

    def scales(self, stored, tail):
        return _power(stored["scale"])


def _exponent(x: Float[Array, "*s"]):
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    return ((bits >> np.uint32(23)) & np.uint32(255)).astype(jnp.int32)


def _nearest_exponent(scale: Float[Array, "*s"]) -> UInt8[Array, "*s"]:
    # The exponent of the nearest power of two. Half of a mantissa carries.
    bits = lax.bitcast_convert_type(jnp.abs(scale), jnp.uint32) + np.uint32(2**22)
    exponent = jnp.clip(bits >> np.uint32(23), 1, _nan - 1).astype(jnp.uint8)
    return jnp.where(jnp.isfinite(scale), exponent, np.uint8(_nan))


def _power(exponent: UInt8[Array, "*s"]) -> Float[Array, "*s"]:
    # By bits: on a CPU, XLA converts from `float8_e8m0fnu` one number after another.
    # (And casts of zeros and of negative numbers to it differ between implementations.)
    bits = exponent.astype(jnp.uint32) << np.uint32(23)
    bits = jnp.where(exponent == 0, np.uint32(2**22), bits)  # A subnormal number.
    bits = jnp.where(exponent == _nan, np.uint32(0x7FC00000), bits)
    return lax.bitcast_convert_type(bits, jnp.float32)


def _scaled(x: Float[Array, "*s"], exponent: UInt8[Array, "*s"]) -> Float[Array, "*s"]:
    # Returns `x * 2**(exponent - 127)` without flushing subnormal results: where the
    # result may be subnormal, the product is `_up` powers of two larger, and is reduced
    # by its bits. (Points have few bits, and lose none when they are shifted. The
    # product comes first, since XLA would compute `x` for each use of it.)
    small = exponent < _up
    y = x * _power(jnp.where(small, exponent + np.uint8(_up), exponent))
    bits = lax.bitcast_convert_type(y, jnp.uint32)
    sign, rest = bits & np.uint32(2**31), bits & np.uint32(2**31 - 1)
    power = _exponent(y) - _up
    shift = jnp.clip(1 - power, 0, 31).astype(jnp.uint32)
    subnormal = (rest & np.uint32(2**23 - 1) | np.uint32(2**23)) >> shift
    found = jnp.where(power > 0, rest - np.uint32(_up << 23), subnormal)
    # Zeros, infinities and NaNs are unchanged.
    special = (rest == 0) | (rest >= np.uint32(255 << 23))
    bits = jnp.where(small & ~special, sign | found, bits)
    return lax.bitcast_convert_type(bits, jnp.float32)
