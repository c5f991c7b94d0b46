"""The sixteen points of GGUF's `IQ4` types."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._adjustable import Parameters
from .._blocks import absmax
from .._candidates import scales_around
from .._grid import AbstractGrid
from ._search import PointSearch


# Like ggml, tries scales that map the largest number to the first point, to a number
# around it, or to the opposite ones.
points = PointSearch(
    (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    (127, *range(-134, -119)),
)
_factors_of_powers = np.array([0.001586, 0.07867, -0.1372, 11.52, -4.301], np.float32)


class _IQ4(AbstractGrid):
    """A point for each code, with a float32 scale for each 32 numbers. Zero is not
    among the points, and the two ends have different distances from zero."""

    block_size: ClassVar[int] = 32
    scale_dtype: ClassVar[Any] = np.dtype(np.float32)
    levels: ClassVar[int] = 16
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        # The scale that maps the largest number, if it is positive, to -127.
        return absmax(blocks) / -127

    def to_codes(self, blocks, size, scale):
        return points.to_codes(blocks, scale)

    def to_points(self, codes):
        # Evaluates `points` by a polynomial that is within .45 of each point. (On a
        # CPU, a lookup in XLA takes several times as long.)
        x = codes.astype(jnp.float32) - np.float32(7.5)
        total = jnp.zeros_like(x)
        for factor in _factors_of_powers:
            total = total * x + factor
        return jnp.round(total)

    def candidates(self, blocks, size):
        # Up to scales that map the largest number to the other end of the grid.
        return Parameters(scales_around(self, blocks, size, most=1.15), None)


iq4 = _IQ4()
