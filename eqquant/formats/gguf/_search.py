"""How ggml looks for the scales of the small blocks that a large one consists of. (Not
to the last bit: sums are of another order.)"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt8

from .._scale import divided, reciprocal


def best_scale(blocks: Float[Array, "*b s"], half: int) -> Float[Array, "*b 1"]:
    """The scale, of either sign, by which integers from `-half` to `half - 1` come
    nearest to numbers. Their errors count by their squares.

    Tries scales around the one by which the largest number becomes `-half`, with the
    best scale for the integers that each gives. (`make_qx_quants`.)
    """
    # So that no power of them is flushed to zero.
    largest = signed_largest(blocks)
    blocks = blocks * reciprocal(largest)
    weights = blocks**2

    def sums(factor):
        codes = jnp.clip(jnp.round(factor * blocks), -half, half - 1)
        product = _sum(weights * codes * blocks)
        return product, _sum(weights * codes**2)

    def step(i, best):
        most, scale = best
        product, square = sums(-(half + 0.1 * (i - 9)))
        gain = product**2 * reciprocal(square)
        better = gain > most
        new = jnp.where(better, product * reciprocal(square), scale)
        return jnp.where(better, gain, most), new

    zero = jnp.zeros_like(blocks[..., :1])
    _, scale = lax.fori_loop(0, 19, step, (zero, zero))
    return scale * largest


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
    largest = jnp.abs(signed_largest(blocks))
    blocks, weights = blocks * reciprocal(largest), weights * reciprocal(largest)
    low = jnp.minimum(jnp.min(blocks, axis=-1, keepdims=True), 0)
    high = jnp.max(blocks, axis=-1, keepdims=True)
    sum_w, sum_x = _sum(weights), _sum(weights * blocks)

    def to_codes(factor):
        return jnp.clip(jnp.round(factor * (blocks - low)), 0, most)

    def error(scale, low, codes):
        difference = scale * codes + low - blocks
        size = jnp.abs(difference) if absolute else difference**2
        return _sum(weights * size)

    def step(i, best):
        least, best_scale, best_low = best
        codes = to_codes((most + start + 0.1 * i) * reciprocal(high - low))
        sum_l, sum_l2 = _sum(weights * codes), _sum(weights * codes**2)
        sum_xl = _sum(weights * codes * blocks)
        determinant = sum_w * sum_l2 - sum_l**2
        scale = (sum_w * sum_xl - sum_x * sum_l) * reciprocal(determinant)
        bottom = (sum_l2 * sum_x - sum_l * sum_xl) * reciprocal(determinant)
        above = bottom > 0
        scale = jnp.where(above, sum_xl * reciprocal(sum_l2), scale)
        bottom = jnp.where(above, 0, bottom)
        new = error(scale, bottom, codes)
        better = (determinant > 0) & (scale > 0) & (new < least)
        take = lambda new, old: jnp.where(better, new, old)
        return take(new, least), take(scale, best_scale), take(bottom, best_low)

    scale = (high - low) / most
    codes = to_codes(reciprocal(scale))
    first = (error(scale, low, codes), scale, low)
    _, scale, low = lax.fori_loop(0, steps + 1, step, first)
    return scale * largest, -low * largest


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
    index = jnp.argmax(jnp.abs(blocks), axis=-1, keepdims=True)
    return jnp.take_along_axis(blocks, index, axis=-1)


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
