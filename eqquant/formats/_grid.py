import abc
from typing import ClassVar

import equinox as eqx
import numpy as np
from jaxtyping import Array, Float, Integer

from ._base import AbstractScaled, Stored
from ._blocks import merge, split, spread
from ._packing import pack, per_byte, unpack
from ._scale import from_bits, poison, to_bits


class AbstractGrid(AbstractScaled):
    """A format whose numbers are a scale, one for each block, times a point of a fixed
    grid. A subclass says what the grid is, as a `diffrax` solver gives its tableau.

    Codes are packed as densely as whole bytes allow: eight to a byte on a grid of two
    levels, five on one of three, two on one of sixteen. They lie in memory with the
    contracted axis first: on a CPU, a product takes the same byte of every row at once.
    """

    levels: eqx.AbstractClassVar[int]
    row_axis: ClassVar[int] = -1

    @abc.abstractmethod
    def fit(
        self, blocks: Float[Array, "*b g s"], size: Float[np.ndarray, "*_ g 1"]
    ) -> Float[Array, "*b g 1"]:
        """The scale of each block. `size` is how many numbers each block has; zeros
        follow where that is less than `s`."""

    @abc.abstractmethod
    def to_codes(
        self,
        blocks: Float[Array, "*b g s"],
        size: Float[np.ndarray, "*_ g 1"],
        scale: Float[Array, "*b g 1"],
    ) -> Integer[Array, "*b g s"]:
        """The code of the grid point that each number becomes."""

    @abc.abstractmethod
    def to_points(self, codes: Integer[Array, "*b k"]) -> Float[Array, "*b k"]:
        """The grid point, in float32, of each code."""

    @property
    def radix(self) -> int:
        """The base whose digits the codes of a byte are."""
        return self.levels

    @property
    def bits(self) -> float:
        return 8 / per_byte(self.radix)

    def encode(self, w, scale=None) -> Stored:
        blocks, size = split(w, self.block_size)
        scale = self.fit(blocks, size) if scale is None else scale[..., None]
        bits = to_bits(poison(scale, blocks), self.scale_dtype)
        codes = self.to_codes(blocks, size, from_bits(bits, self.scale_dtype))
        codes = pack(merge(codes, w.shape[-1]), self.radix)
        return {"codes": codes, "scale": bits[..., 0]}

    def decode(self, stored, tail):
        codes = unpack(stored["codes"], self.radix, tail)
        scale = spread(self.scales(stored, tail), self.block_size, codes.shape[-1])
        return self.to_points(codes) * scale

    def scales(self, stored, tail):
        return from_bits(stored["scale"], self.scale_dtype)

    def shape(self, stored, tail):
        *lead, j = stored["codes"].shape
        return (*lead, j * per_byte(self.radix) - tail)
