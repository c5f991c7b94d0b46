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
    # Squares of numbers near one stay within float32; powers of two change no digits.
    _, exponent = math.frexp(float(_peak(w)))
    unit = np.float32(2.0 ** min(max(-exponent, -126), 126))
    signal = _power(w, np.float32(0), unit)
    noise = _power(w, approximation, unit)
    if noise == 0:
        return math.inf
    return -math.inf if signal == 0 else 10 * math.log10(signal / noise)


def _power(w, other, unit):
    rows = np.asarray(_power_of_rows(w, other, unit))
    return float(np.sum(rows, dtype=np.float64))


# Each of these is one loop, so that XLA makes no array of the size of `w` for it. A row
# is short enough to be summed in float32.


@jax.jit
def _peak(w):
    return jnp.max(jnp.abs(w), initial=0)


@jax.jit
def _power_of_rows(w, other, unit):
    wide = jnp.float64 if w.dtype == jnp.float64 else jnp.float32
    unit = unit.astype(wide)
    difference = jnp.atleast_1d(w.astype(wide) * unit - other.astype(wide) * unit)
    return jnp.sum(jnp.square(difference), axis=-1)
