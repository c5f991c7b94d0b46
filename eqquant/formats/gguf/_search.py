"""Searches for the scales of small blocks like ggml. (Not bit-identical: sums are in
another order.)

All candidates are computed in one loop, whose innermost axis is the blocks of a row: a
sum over the numbers of a block adds up arrays, `_planes`, so that XLA:CPU computes it
for several blocks at once.

A compiler may fuse a product and a sum, and round both once. So that all find the same
bits, products that are added have few enough bits to be exact, or are `each_rounded`
before. `kernels.native` computes the same, number by number."""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from .._blocks import absmax
from .._scale import divided, or_nan, reciprocal


class IntegerSearch(NamedTuple):
    """The integers from `-half` to `half - 1`, as the points of `best_multiple`. Tries
    scales around the one that maps the largest number to `-half`.
    (`make_qx_quants`.)"""

    half: int

    @property
    def factors(self) -> Float[np.ndarray, " c"]:
        return -(self.half + np.float32(0.1) * np.arange(-9, 10, dtype=np.float32))

    def best(self, blocks: Float[Array, "*b s"]) -> Float[Array, "*b 1"]:
        return best_multiple(blocks, self.factors, self._nearest)

    def to_codes(
        self, blocks: Float[Array, "*#b s"], scale: Float[Array, "*#b 1"]
    ) -> UInt8[Array, "*b s"]:
        codes = self._nearest(blocks * reciprocal(scale)) + self.half
        return codes.astype(jnp.uint8)

    def _nearest(self, x):
        return jnp.clip(jnp.round(x), -self.half, self.half - 1)


class PointSearch(NamedTuple):
    """Sixteen integers, in ascending order, as the points of `best_multiple`. Tries the
    scales that map the largest number to each of `tried`. Ties go to the higher
    point."""

    points: tuple[int, ...]
    tried: tuple[int, ...]

    @property
    def factors(self) -> Float[np.ndarray, " c"]:
        return np.array(self.tried, np.float32)

    def best(self, blocks: Float[Array, "*b s"]) -> Float[Array, "*b 1"]:
        return best_multiple(blocks, self.factors, self._nearest)

    def to_codes(
        self, blocks: Float[Array, "*#b s"], scale: Float[Array, "*#b 1"]
    ) -> UInt8[Array, "*b s"]:
        unit = blocks * reciprocal(scale)
        code = jnp.zeros(unit.shape, jnp.uint8)
        for edge in self._edges:
            code += (unit >= edge).astype(jnp.uint8)
        return code

    def _nearest(self, x):
        points = np.array(self.points, np.float32)
        point = jnp.full(x.shape, points[0])
        for edge, next in zip(self._edges, points[1:], strict=True):
            point = jnp.where(x >= edge, next, point)
        return point

    @property
    def _edges(self):
        points = np.array(self.points, np.float32)
        return (points[1:] + points[:-1]) / 2


class RangeSearch(NamedTuple):
    """The integers from 0 to `most`, times a step, less the distance below zero at
    which they begin. Tries steps around the one that leads from the smallest number, or
    zero, to the largest, with the best line through the integers that each gives.
    (`make_qkx2_quants`.)

    - `most`: at most 31.
    - `start`, `steps`: the widest range that is tried has `most + start` steps, and
        each further one 0.1 more.
    - `absolute`: whether to minimize absolute errors, weighted by the size of the
        number. Otherwise squared errors, with more even weights.
    """

    most: int
    start: float
    steps: int
    absolute: bool = False

    @property
    def factors(self) -> Float[np.ndarray, " c"]:
        some = np.float32(0.1) * np.arange(self.steps + 1, dtype=np.float32)
        return np.float32(self.most + self.start) + some

    def best(
        self, blocks: Float[Array, "*b s"]
    ) -> tuple[Float[Array, "*b 1"], Float[Array, "*b 1"]]:
        weights = jnp.abs(blocks)
        if not self.absolute:
            weights = _root_mean_square(blocks) + weights
        return best_range(blocks, weights, self.most, self.factors, self.absolute)


def best_multiple(
    blocks: Float[Array, "*b s"],
    factors: Float[np.ndarray, " c"],
    nearest: Callable[[Float[Array, "..."]], Float[Array, "..."]],
) -> Float[Array, "*b 1"]:
    """Returns the scale, of either sign, that brings points nearest to numbers. The
    square of an error is weighted by the square of the number.

    Tries the scales that map the largest number to each of the `factors`, with the best
    scale for the points that each gives. Of equally good scales, the first is taken.

    - `nearest`: rounds to the nearest point, an integer from -128 to 128.
    """
    # Normalized, so that no power of the numbers is flushed to zero.
    largest = signed_largest(blocks)
    blocks = blocks * reciprocal(largest)
    weights = _of_bits(blocks**2, 10)
    x, w, wx = map(_planes, (blocks, weights, _of_bits(weights * blocks, 16)))
    tried = jnp.asarray(_candidates(factors, blocks))
    points = [nearest(tried * a) for a in x]
    product = _kept(_total([v * c for c, v in zip(points, wx)]))
    square = _kept(_total([v * c**2 for c, v in zip(points, w)]))
    gain = _kept(product**2 * reciprocal(square))
    scale = _kept(product * reciprocal(square))
    zero = jnp.zeros_like(gain[..., :1, :])
    best = _first_least((-gain, scale), (zero, zero))
    return _kept(best[1].swapaxes(-1, -2) * largest)


def best_range(
    blocks: Float[Array, "*b s"],
    weights: Float[Array, "*b s"],
    most: int,
    factors: Float[np.ndarray, " c"],
    absolute: bool,
) -> tuple[Float[Array, "*b 1"], Float[Array, "*b 1"]]:
    """Returns the step, and the distance below zero at which to begin, that bring
    integers from 0 to `most` nearest to numbers. Neither is negative. Tries the ranges
    from the smallest number, or zero, to the largest that have each of the `factors` of
    steps.
    """
    largest = absmax(blocks)
    blocks = each_rounded(blocks * reciprocal(largest))
    weights = _of_bits(weights * reciprocal(largest), 14)
    weighted = _of_bits(weights * blocks, 19)
    low = jnp.minimum(jnp.min(blocks, axis=-1, keepdims=True), 0)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    sum_w, sum_x = _steady_sum(weights), _steady_sum(weighted)
    x, w, wx, above = map(_planes, (blocks, weights, weighted, blocks - low))
    low, high, sum_w, sum_x = (a.swapaxes(-1, -2) for a in (low, high, sum_w, sum_x))

    def to_codes(factor):
        return [jnp.clip(jnp.round(factor * a), 0, most) for a in above]

    def error(codes, scale, low):
        difference = [scale * c + low - a for c, a in zip(codes, x)]
        size = [jnp.abs(d) if absolute else d**2 for d in difference]
        return _kept(_total([each_rounded(v * d) for v, d in zip(w, size)]))

    codes = to_codes(_candidates(factors, low) * reciprocal(high - low))
    sum_l = _kept(_total([v * c for v, c in zip(w, codes)]))
    sum_l2 = _kept(_total([v * c**2 for v, c in zip(w, codes)]))
    sum_xl = _kept(_total([v * c for v, c in zip(wx, codes)]))
    determinant = _difference(sum_w * sum_l2, sum_l**2)
    scale = _difference(sum_w * sum_xl, sum_x * sum_l) * reciprocal(determinant)
    bottom = _difference(sum_l2 * sum_x, sum_l * sum_xl) * reciprocal(determinant)
    scale = jnp.where(bottom > 0, sum_xl * reciprocal(sum_l2), scale)
    scale = _kept(_of_bits(scale, 19))
    bottom = _kept(jnp.where(bottom > 0, 0, bottom))
    new = error(codes, scale, bottom)
    new = jnp.where((determinant > 0) & (scale > 0), new, jnp.inf)
    first = _of_bits((high - low) * np.float32(1 / most), 19)
    least = error(to_codes(reciprocal(first)), first, low)
    _, *best = _first_least((new, scale, bottom), (least, first, low))
    # (The absolute value removes the sign of a zero.)
    scale, below = (jnp.abs(a.swapaxes(-1, -2)) for a in best)
    return _kept(scale * largest), _kept(below * largest)


def _root_mean_square(blocks):
    square = _steady_sum(each_rounded(blocks**2))
    return jnp.sqrt(square * np.float32(1 / blocks.shape[-1]))


def _of_bits(x, bits):
    # Rounds to numbers of this many bits.
    return lax.reduce_precision(x, 8, bits - 1)


def _difference(a, b):
    return each_rounded(a) - each_rounded(b)


def _planes(blocks):
    """Returns the first number of each block, the second, and so on."""
    # The axes are merged, so that XLA has to transpose them in memory, too.
    *lead, number, size = blocks.shape
    x = blocks.swapaxes(-1, -2).reshape(*lead, 1, size * number)
    return [x[..., i * number : (i + 1) * number] for i in range(size)]


def _candidates(factors, blocks):
    return factors.reshape((1,) * (blocks.ndim - 2) + (len(factors), 1))


def _first_least(candidates, best):
    # Selects the candidate with the smallest first array. `best` comes before the
    # candidates.
    for i in range(candidates[0].shape[-2]):
        found = [a[..., i : i + 1, :] for a in candidates]
        better = found[0] < best[0]
        best = [jnp.where(better, a, b) for a, b in zip(found, best)]
    return best


def _total(x):
    # The same as `_steady_sum`, over planes.
    while len(x) > 1:
        half = len(x) // 2
        x = [a + b for a, b in zip(x[:half], x[half:])]
    return x[0]


def each_rounded(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Rounds a product before it is added to another."""
    return or_nan(~jnp.isnan(x), x)


def _kept(x):
    # XLA computes a quotient once, not in each loop that reads it.
    return divided(x, 1)


def _steady_sum(x: Float[Array, "*b s"]) -> Float[Array, "*b 1"]:
    """Sums in an order that is the same for any number of blocks: of two equally good
    scales, each device of a mesh should take the one that a single device would."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def rounded(
    x: Float[Array, "*b s"], scale: Float[Array, "*b 1"], low: int, high: int
) -> Float[Array, "*b s"]:
    """Returns the nearest multiples of a scale, as integers in a range."""
    return jnp.clip(jnp.round(x * reciprocal(scale)), low, high)


def signed_largest(blocks: Float[Array, "*b s"]) -> Float[Array, "*b 1"]:
    """Returns the first number with the largest absolute value."""
    # (XLA:CPU takes several times as long for `argmax` and a lookup.)
    largest = absmax(blocks)
    size = blocks.shape[-1]
    position = np.arange(size, dtype=np.int32).reshape((1,) * (blocks.ndim - 1) + (-1,))
    where = 2 * position + jnp.signbit(blocks).astype(jnp.int32)
    where = jnp.where(jnp.abs(blocks) == largest, where, 2 * size)
    first = jnp.min(where, axis=-1, keepdims=True)
    return jnp.where(first % 2 == 1, -largest, largest)


def half_up(x: Float[Array, "*b s"], zero: int, levels: int) -> UInt8[Array, "*b s"]:
    """Returns the integer part of `x + zero + 0.5`, in a range, to the last bit,
    including the rounding of this sum."""
    # Without the sum, which XLA may fuse with a product before it, and round both once.
    # These are the smallest numbers with which the result is 0, 1, and so on:
    sums = np.arange(levels + 1, dtype=np.float32)
    ulp = np.spacing(np.nextafter(sums, np.float32(0)))
    edges = (sums.astype(np.float64) - zero - 0.5 - ulp / 2).astype(np.float32)
    code = jnp.clip(jnp.floor(x) + zero, 0, levels - 1).astype(jnp.uint8)
    edge = jnp.asarray(edges).at[code + np.uint8(1)].get(mode="promise_in_bounds")
    return jnp.minimum(code + (x >= edge).astype(jnp.uint8), np.uint8(levels - 1))


def half_away(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Rounds to nearest, with halves away from zero."""
    whole = jnp.floor(jnp.abs(x))
    return jnp.sign(x) * (whole + (jnp.abs(x) >= whole + 0.5).astype(x.dtype))


def range_of(
    blocks: Float[Array, "*b s"], steps: int
) -> tuple[Float[Array, "*b 1"], Float[Array, "*b 1"]]:
    """Returns the step that leads from the smallest number to the largest, and the
    smallest."""
    low = jnp.min(blocks, axis=-1, keepdims=True)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    return divided(high - low, steps), low
