import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped


def split(
    w: Float[Array, "*b k"], block_size: int | None
) -> tuple[Float[Array, "*b g s"], Float[np.ndarray, "*_ g 1"]]:
    """Cuts the last axis into blocks, in float32. The last block is padded with zeros
    if it is short. Returns the blocks, and the number of values in each of them without
    padding. (The leading axes of the latter have size one.)"""
    k = w.shape[-1]
    size = k if block_size is None else block_size
    number = 1 if block_size is None else -(-k // block_size)
    padding = [(0, 0)] * (w.ndim - 1) + [(0, number * size - k)]
    blocks = jnp.pad(w.astype(jnp.float32), padding)
    blocks = blocks.reshape(*w.shape[:-1], number, size)
    start = size * np.arange(number, dtype=np.float32)
    start = start.reshape((1,) * (w.ndim - 1) + (number, 1))
    return blocks, np.minimum(k - start, size)


def merge(blocks: Shaped[Array, "*b g s"], k: int) -> Shaped[Array, "*b k"]:
    """The inverse of `split`."""
    *lead, number, size = blocks.shape
    return blocks.reshape(*lead, number * size)[..., :k]


def spread(
    of_blocks: Shaped[Array, "*b g"], block_size: int | None, k: int
) -> Shaped[Array, "*b _"]:
    """Repeats the value of each block, such as a scale, for each of its positions."""
    if block_size is None:
        return of_blocks
    return jnp.repeat(of_blocks, block_size, axis=-1)[..., :k]


def absmax(blocks: Float[Array, "*b s"]) -> Float[Array, "*b 1"]:
    """Returns the largest absolute value of each block. (On CPU, it may ignore
    NaNs.)"""
    # XLA would write `abs(blocks)` to memory before taking its maximum.
    high = jnp.max(blocks, axis=-1, keepdims=True, initial=0)
    low = jnp.min(blocks, axis=-1, keepdims=True, initial=0)
    return jnp.abs(jnp.maximum(high, -low))  # Removes the sign of a zero.


def steady_sum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """Sums non-negative numbers along an axis, which is kept with size one. The result
    is bit-identical for any layout or sharding: each number is split into two
    fixed-point halves, which are summed as int32. The size of the axis limits their
    bits."""
    bits = 30 - math.ceil(math.log2(max(1, x.shape[axis])))
    _, exponent = jnp.frexp(jnp.max(x, axis, keepdims=True, initial=0))
    high = jnp.ldexp(x, bits - exponent)
    low = (high - jnp.floor(high)) * 2.0**bits

    def integers(x):
        return jnp.sum(x.astype(jnp.int32), axis, keepdims=True).astype(jnp.float32)

    return jnp.ldexp(integers(high) + integers(low) * 2.0**-bits, exponent - bits)
