"""How ggml chooses the scales of blocks, and rounds to them."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, UInt8

from ._scale import divided


def inverse(scale: Float[Array, "*s"]) -> Float[Array, "*s"]:
    return jnp.where(scale == 0, 0, 1 / jnp.where(scale == 0, 1, scale))


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
