import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import ArrayLike, Float


def sqnr(w: Float[ArrayLike, "..."], approximation: Float[ArrayLike, "..."]) -> float:
    """The signal-to-quantization-noise ratio of an approximation of `w`,
    `10 log10(sum(w**2) / sum((w - approximation)**2))`, in decibels. Infinite if it is
    exact.
    """
    signal, noise = (
        np.sum(np.asarray(a), dtype=np.float64) for a in _powers(w, approximation)
    )
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * math.log10(signal / noise)


@jax.jit
def _powers(w, approximation):
    # Of each row, so that float32 is enough to sum in; and of numbers near one, so that
    # it is enough to square in. XLA makes no array of the size of `w` for this.
    dtype = jnp.promote_types(w.dtype, jnp.float32)
    w = jnp.atleast_1d(w).astype(dtype)
    difference = w - jnp.atleast_1d(approximation).astype(dtype)
    peak = jnp.max(jnp.abs(w), initial=0)
    unit = jnp.where(peak == 0, 1, peak)
    return [jnp.sum(jnp.square(a / unit), axis=-1) for a in (w, difference)]
