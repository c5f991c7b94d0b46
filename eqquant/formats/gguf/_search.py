"""How ggml looks for the scales of the small blocks that a large one consists of. (Not
to the last bit: sums are of another order.)

All candidates are computed in one loop, whose innermost axis is the blocks of a row: a
sum over the numbers of a block adds up arrays, `_planes`, so that XLA:CPU computes it
for several blocks at once."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from .._blocks import absmax
from .._scale import divided, reciprocal


def best_scale(blocks: Float[Array, "*b s"], half: int) -> Float[Array, "*b 1"]:
    """The scale, of either sign, by which integers from `-half` to `half - 1` come
    nearest to numbers.

    Tries scales around the one by which the largest number becomes `-half`.
    (`make_qx_quants`.)
    """
    factors = half + np.float32(0.1) * np.arange(-9, 10, dtype=np.float32)
    nearest = lambda x: jnp.clip(jnp.round(x), -half, half - 1)
    return best_multiple(blocks, -factors, nearest)


def best_multiple(
    blocks: Float[Array, "*b s"],
    factors: Float[np.ndarray, " c"],
    nearest: Callable[[Float[Array, "..."]], Float[Array, "..."]],
) -> Float[Array, "*b 1"]:
    """The scale, of either sign, by which points come nearest to numbers. The square of
    an error counts as often as the square of the number is large.

    Tries the scales by which the largest number becomes each of the `factors`, with the
    best scale for the points that each gives. The first of equally good ones is taken.

    - `nearest`: rounds to the nearest point.
    """
    # So that no power of them is flushed to zero.
    largest = signed_largest(blocks)
    x = _planes(blocks * reciprocal(largest))
    tried = jnp.asarray(_candidates(factors, blocks))
    points = [nearest(tried * a) for a in x]
    product = _kept(_total([_rounded(a**2 * c * a) for c, a in zip(points, x)]))
    square = _kept(_total([_rounded(a**2 * c**2) for c, a in zip(points, x)]))
    gain = _kept(product**2 * reciprocal(square))
    scale = _kept(product * reciprocal(square))
    zero = jnp.zeros_like(gain[..., :1, :])
    best = _first_least((-gain, scale), (zero, zero))
    return _kept(best[1].swapaxes(-1, -2) * largest)


def best_range(
    blocks: Float[Array, "*b s"],
    weights: Float[Array, "*b s"],
    most: int,
    start: float,
    steps: int,
    absolute: bool,
) -> tuple[Float[Array, "*b 1"], Float[Array, "*b 1"]]:
    """The step, and how far below zero to begin, by which integers from 0 to `most`
    come nearest to numbers. Neither is negative.

    Tries steps around that which leads from the least number, or zero, to the largest,
    with the best line through the integers that each gives. (`make_qkx2_quants`.)

    - `start`, `steps`: the widest range that is tried has `most + start` steps, and
      each that follows 0.1 more.
    - `absolute`: whether errors count by their absolute values, or by their squares.
    """
    largest = absmax(blocks)
    blocks, weights = blocks * reciprocal(largest), weights * reciprocal(largest)
    low = jnp.minimum(jnp.min(blocks, axis=-1, keepdims=True), 0)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    sum_w, sum_x = _sum(weights), _sum(weights * blocks)
    x, w, above = _planes(blocks), _planes(weights), _planes(blocks - low)
    low, high, sum_w, sum_x = (a.swapaxes(-1, -2) for a in (low, high, sum_w, sum_x))

    def to_codes(factor):
        return [jnp.clip(jnp.round(factor * a), 0, most) for a in above]

    def error(codes, scale, low):
        difference = [scale * c + low - a for c, a in zip(codes, x)]
        size = [jnp.abs(d) if absolute else d**2 for d in difference]
        return _kept(_total([v * d for v, d in zip(w, size)]))

    steps_of = np.float32(0.1) * np.arange(steps + 1, dtype=np.float32)
    factors = _candidates(np.float32(most + start) + steps_of, low)
    codes = to_codes(factors * reciprocal(high - low))
    sum_l = _kept(_total([v * c for v, c in zip(w, codes)]))
    sum_l2 = _kept(_total([v * c**2 for v, c in zip(w, codes)]))
    sum_xl = _kept(_total([v * c * a for v, c, a in zip(w, codes, x)]))
    determinant = sum_w * sum_l2 - sum_l**2
    scale = _kept((sum_w * sum_xl - sum_x * sum_l) * reciprocal(determinant))
    bottom = _kept((sum_l2 * sum_x - sum_l * sum_xl) * reciprocal(determinant))
    scale = _kept(jnp.where(bottom > 0, sum_xl * reciprocal(sum_l2), scale))
    bottom = _kept(jnp.where(bottom > 0, 0, bottom))
    new = error(codes, scale, bottom)
    new = jnp.where((determinant > 0) & (scale > 0), new, jnp.inf)
    first = (high - low) / most
    least = error(to_codes(reciprocal(first)), first, low)
    _, *best = _first_least((new, scale, bottom), (least, first, low))
    scale, bottom = (a.swapaxes(-1, -2) for a in best)
    return _kept(scale * largest), _kept(-bottom * largest)


def _planes(blocks):
    """The first number of each block, the second, and so on."""
    # In memory, too: merged, the axes cannot stay as they were.
    *lead, number, size = blocks.shape
    x = blocks.swapaxes(-1, -2).reshape(*lead, 1, size * number)
    return [x[..., i * number : (i + 1) * number] for i in range(size)]


def _candidates(factors, blocks):
    return factors.reshape((1,) * (blocks.ndim - 2) + (len(factors), 1))


def _first_least(candidates, best):
    # By the first of the arrays. `best` comes before the candidates.
    for i in range(candidates[0].shape[-2]):
        found = [a[..., i : i + 1, :] for a in candidates]
        better = found[0] < best[0]
        best = [jnp.where(better, a, b) for a, b in zip(found, best)]
    return best


def _total(x):
    # As `_sum`, of planes.
    while len(x) > 1:
        half = len(x) // 2
        x = [a + b for a, b in zip(x[:half], x[half:])]
    return x[0]


def _rounded(x):
    # Before the sum: of both, XLA would otherwise make one operation.
    return jnp.where(jnp.isnan(x), jnp.nan, x)


def _kept(x):
    # XLA computes a quotient once, not in each loop that reads it.
    return divided(x, 1)


def _sum(x):
    # In an order that is the same for any number of blocks: of two equally good scales,
    # each device of a mesh should take the one that all would.
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


def rounded(
    x: Float[Array, "*b s"], scale: Float[Array, "*b 1"], low: int, high: int
) -> Float[Array, "*b s"]:
    """The nearest multiples of a scale, as integers in a range."""
    return jnp.clip(jnp.round(x * reciprocal(scale)), low, high)


def signed_largest(blocks: Float[Array, "*b s"]) -> Float[Array, "*b 1"]:
    """The number of the largest absolute value, the first of them."""
    # (XLA:CPU takes several times as long for `argmax`, and again to look it up.)
    largest = absmax(blocks)
    size = blocks.shape[-1]
    position = np.arange(size, dtype=np.int32).reshape((1,) * (blocks.ndim - 1) + (-1,))
    where = 2 * position + jnp.signbit(blocks).astype(jnp.int32)
    where = jnp.where(jnp.abs(blocks) == largest, where, 2 * size)
    first = jnp.min(where, axis=-1, keepdims=True)
    return jnp.where(first % 2 == 1, -largest, largest)


def half_up(x: Float[Array, "*b s"], zero: int, levels: int) -> UInt8[Array, "*b s"]:
    """The integers `x + zero + 0.5`, less what follows the point, in a range. To the
    last bit, the rounding of that sum included."""
    # Without the sum, which XLA may join with a product before it, and round both once.
    # The smallest numbers by which it is 0, 1, and so on:
    sums = np.arange(levels + 1, dtype=np.float32)
    ulp = np.spacing(np.nextafter(sums, np.float32(0)))
    edges = (sums.astype(np.float64) - zero - 0.5 - ulp / 2).astype(np.float32)
    code = jnp.clip(jnp.floor(x) + zero, 0, levels - 1).astype(jnp.uint8)
    edge = jnp.asarray(edges).at[code + np.uint8(1)].get(mode="promise_in_bounds")
    return jnp.minimum(code + (x >= edge).astype(jnp.uint8), np.uint8(levels - 1))


def half_away(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Rounds, halves away from zero."""
    whole = jnp.floor(jnp.abs(x))
    return jnp.sign(x) * (whole + (jnp.abs(x) >= whole + 0.5).astype(x.dtype))


def range_of(
    blocks: Float[Array, "*b s"], steps: int
) -> tuple[Float[Array, "*b 1"], Float[Array, "*b 1"]]:
    """The step that leads from the least number to the largest, and the least."""
    low = jnp.min(blocks, axis=-1, keepdims=True)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    return divided(high - low, steps), low
