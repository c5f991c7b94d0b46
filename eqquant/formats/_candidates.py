import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from ._adjustable import Parameters
from ._blocks import absmax


def scales_around(format, blocks, size, most=1.05) -> Float[Array, "c *b g 1"]:
    """Returns scales with which the largest number of a block is within the grid, at
    its end, or beyond it. The fewer levels a grid has, the more it may gain from these.
    They are up to `most` times the scale that puts the number at the end."""
    first = format.fit(blocks, size)
    end = format.fit(absmax(blocks), np.ones_like(size))
    ratios = np.linspace(_least(format.levels), most, 29, dtype=np.float32)
    ratios = np.concatenate([ratios, -ratios]) if format.mirrored else ratios
    found = jnp.reshape(ratios, (-1, *(1,) * blocks.ndim)) * end[None]
    return jnp.concatenate([jnp.broadcast_to(first, end.shape)[None], found])


def ranges_within(format, blocks, size) -> Parameters:
    """Returns the parameters of ranges that leave out some of the smallest and of the
    largest numbers of a block."""
    ratios = np.linspace(_least(format.levels), 1, 11, dtype=np.float32)
    # (The full range, as in rounding to nearest, comes first.)
    pairs = [(a, b) for a in ratios[::-1] for b in ratios[::-1] if abs(a - b) < 0.26]
    a, b = np.reshape(np.array(pairs, np.float32).T, (2, -1, *(1,) * blocks.ndim))
    inside = np.arange(blocks.shape[-1]) < np.maximum(size, 1)
    low = jnp.min(jnp.where(inside, blocks, jnp.inf), -1, keepdims=True)
    high = jnp.max(jnp.where(inside, blocks, -jnp.inf), -1, keepdims=True)
    ends = jnp.concatenate([a * low[None], b * high[None]], -1)
    two = np.full_like(size, 2)[None]
    scale = format.held(Parameters(format.fit(ends, two), None)).scale
    return Parameters(scale, format.fit_offset(ends, two, scale))


def _least(levels):
    return 0.2 if levels <= 4 else 0.35 if levels <= 16 else 0.7
