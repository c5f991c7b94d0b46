import abc

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int, Shaped

from ._adjustable import Parameters
from ._base import Stored
from ._blocks import merge, split
from ._grid import AbstractGrid
from ._scale import in_units, poison


class AbstractDithered(AbstractGrid):
    """A grid that may round numbers up or down pseudo-randomly, so that the mean of the
    results is the number."""

    block_size: eqx.AbstractVar[int | None]
    signed: eqx.AbstractVar[bool]
    dithered: eqx.AbstractVar[bool]

    @abc.abstractmethod
    def rounded_at(
        self, unit: Float[Array, "*b g s"], threshold: Float[Array, "*b g s"] | float
    ) -> Shaped[Array, "*b g s"]:
        """Returns the code of the point above each number, if the number is further
        than `threshold` of the way from the point below it; otherwise the code of the
        point below it."""

    def to_codes(self, blocks, size, scale):
        unit = in_units(blocks, scale)
        return self.rounded_at(unit, dither(unit) if self.dithered else 0.5)

    def encode_dithered(
        self, w: Float[Array, "*b n k"], seed: Int[Array, ""]
    ) -> Stored:
        """Encodes like `encode`. Another seed rounds the same numbers differently."""
        blocks, size = split(w, self.block_size)
        scale = poison(self.fit(blocks, size), blocks)
        settled, (scale, _) = self.settled(Parameters(scale[..., 0], None))
        unit = in_units(blocks, scale[..., None])
        codes = self.rounded_at(unit, dither(unit, seed))
        return self.write(merge(codes, w.shape[-1]), settled)


def dither(x: Float[Array, "*s"], seed: Int[Array, ""] | int = 0) -> Float[Array, "*s"]:
    """Returns pseudo-random numbers between 0 and 1, which depend on the bits of each
    number in float32.

    They are the middles of equal parts, so that none is very close to 0 or 1: a number
    that is a point up to errors of float32 stays at this point.
    """
    # The constants are those of MurmurHash3's finalizer.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    bits = bits + jnp.asarray(seed, jnp.uint32) * np.uint32(0x9E3779B9)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    bits = bits ^ (bits >> np.uint32(16))
    number = (bits >> np.uint32(32 - _bits)).astype(jnp.float32)
    return (number + np.float32(0.5)) * np.float32(2.0**-_bits)


_bits = 13
