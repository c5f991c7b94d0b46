import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped


def split(
    w: Float[Array, "*b k"], block_size: int | None
) -> tuple[Float[Array, "*b g s"], Float[np.ndarray, "*_ g 1"]]:
    """Cuts the last axis into blocks, in float32. The last block may be short, and is
    then filled up with zeros.

    **Returns:**

    The blocks, and how many numbers each of them really has. (Leading axes of the
    latter have size one.)
    """
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
    """Gives each position what belongs to its block: the scale, say."""
    if block_size is None:
        return of_blocks
    return jnp.repeat(of_blocks, block_size, axis=-1)[..., :k]


def steady_sum(x: Float[Array, "..."], axis: int) -> Float[Array, "..."]:
    """The sum along an axis, which stays there with size one, of numbers that are not
    negative. However they lie in memory, and whatever devices they are split over, its
    bits are the same: it is a sum of integers, of about twice as many bits as are left
    over by how many there are."""
    bits = 30 - math.ceil(math.log2(max(1, x.shape[axis])))
    _, exponent = jnp.frexp(jnp.max(x, axis, keepdims=True, initial=0))
    high = jnp.ldexp(x, bits - exponent)
    low = (high - jnp.floor(high)) * 2.0**bits

    def integers(x):
        return jnp.sum(x.astype(jnp.int32), axis, keepdims=True).astype(jnp.float32)

    return jnp.ldexp(integers(high) + integers(low) * 2.0**-bits, exponent - bits)
