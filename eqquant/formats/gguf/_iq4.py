"""The sixteen points that the numbers of GGUF's `IQ4` types are multiples of."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._adjustable import Parameters
from .._blocks import absmax
from .._candidates import scales_around
from .._grid import AbstractGrid
from ._search import PointSearch


# As in ggml, the largest number becomes the first point, or a number around it, or what
# lies opposite.
points = PointSearch(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    (127, *range(-134, -119)),
)
_factors_of_powers = np.array([0.001586, 0.07867, -0.1372, 11.52, -4.301], np.float32)


class _IQ4(AbstractGrid):
    """A point for each code, times a scale in float32 for each 32 of them. Zero is not
    among the points, and the two ends are not equally far from it."""

    block_size: ClassVar[int] = 32
    scale_dtype: ClassVar[Any] = np.dtype(np.float32)
    levels: ClassVar[int] = 16
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        # The scale by which the largest number, if it is positive, becomes -127.
        return absmax(blocks) / -127

    def to_codes(self, blocks, size, scale):
        return points.to_codes(blocks, scale)

    def to_points(self, codes):
        # `points`, by a polynomial that is within .45 of each point. (On a CPU, XLA
        # takes several times as long for a lookup.)
        x = codes.astype(jnp.float32) - np.float32(7.5)
        total = jnp.zeros_like(x)
        for factor in _factors_of_powers:
            total = total * x + factor
        return jnp.round(total)

    def candidates(self, blocks, size):
        # Up to those that lead from the other end of the grid to the largest number.
        return Parameters(scales_around(self, blocks, size, most=1.15), None)


iq4 = _IQ4()
