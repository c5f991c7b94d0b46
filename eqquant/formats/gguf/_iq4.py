"""GGUF's `IQ4` types, which share sixteen points."""

from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._adjustable import Parameters
from .._bit_fields import joined, plane_fields
from .._blocks import absmax
from .._candidates import scales_around
from .._grid import AbstractGrid
from .._scale import all_within
from ._base import BlockFields
from ._k import AbstractK
from ._planes import AbstractGGUFPlanes
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


class IQ4_NL(AbstractGGUFPlanes):
    """GGUF's `IQ4_NL`: sixteen points from -127 to 113, which are denser around zero,
    with a float16 scale for each 32 numbers. Zero is not among the points, but is exact
    in blocks of zeros. 4.5 bits.

    Of 16 scales for a block, of either sign, the one with the smallest sum of squared
    errors is taken, each weighted by the square of the number.

    ??? cite "Reference"

        `quantize_iq4_nl` and `dequantize_row_iq4_nl` of ggml.
    """

    block_size: ClassVar[int] = 32
    search: ClassVar[PointSearch] = points
    levels: ClassVar[int] = 16
    type_size: ClassVar[int] = 18
    width: ClassVar[int] = 16
    mirrored: ClassVar[bool] = True

    def fit(self, blocks, size):
        # No scale in float16 fits larger numbers, and its reciprocal may be zero.
        held = all_within(blocks, np.float32(2.0**40))
        return jnp.where(held, self.search.best(blocks), jnp.inf)

    def to_codes(self, blocks, size, scale):
        return self.search.to_codes(blocks, scale)

    def to_points(self, codes):
        return iq4.to_points(codes)

    def candidates(self, blocks, size):
        around = iq4.candidates(blocks, size).scale
        return Parameters(jnp.concatenate([self.fit(blocks, size)[None], around]), None)


class IQ4_XS(AbstractK):
    """GGUF's `IQ4_XS`: the points of [`eqquant.formats.IQ4_NL`][], with a scale for
    each 32 numbers. The scales are signed 6-bit integers, times a float16 scale for
    each 256 numbers. 4.25 bits.

    ??? cite "Reference"

        `quantize_iq4_xs` and `dequantize_row_iq4_xs` of ggml.
    """

    base: ClassVar[AbstractGrid] = iq4
    search: ClassVar[PointSearch] = points
    type_size: ClassVar[int] = 136
    scale_at: ClassVar[int] = 0
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(8, 128, 4, 16),
        joined(plane_fields(4, 4, 4, 1), plane_fields(2, 2, 2, 1, at=4)),
        zero=32,
    )
