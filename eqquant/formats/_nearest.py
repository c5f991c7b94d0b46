import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ._scale import in_units


def nearest(
    blocks: Float[Array, "*b g s"],
    size: Float[np.ndarray, "*_ g 1"],
    scale: Float[Array, "*#b g 1"],
    points: Float[np.ndarray, " p"],
) -> Integer[Array, "*b g s"]:
    """Returns the index of the nearest of the ascending `points`, times the scale of
    the block, to each number.

    Bit-identical to bitsandbytes: it multiplies by the reciprocal of the scale, but
    divides in a short block; and ties go to the lower point.
    """
    unit = in_units(blocks, scale)
    if np.any(size < blocks.shape[-1]):
        short = blocks[..., -1:, :]
        divisor = jnp.where(scale == 0, 1, scale)[..., -1:, :]
        divisor = jnp.broadcast_to(divisor, short.shape)
        # Without the barrier, XLA would multiply by the reciprocal here, too.
        divided = short / lax.optimization_barrier(divisor)
        unit = jnp.concatenate([unit[..., :-1, :], divided], axis=-2)
    edges = (points[1:] + points[:-1]) / 2
    code = jnp.zeros(unit.shape, jnp.uint8)
    for edge in edges:
        code += (unit > edge).astype(jnp.uint8)
    return code
