import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, ArrayLike, Float


class SquareSums(NamedTuple):
    """The sums of the squares of some numbers, and of their errors."""

    signal: float
    noise: float

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio, in decibels."""
        if self.noise == 0:
            return math.inf
        if self.signal == 0:
            return -math.inf
        return 10 * math.log10(self.signal / self.noise)


def sqnr(w: Float[ArrayLike, "..."], approximation: Float[ArrayLike, "..."]) -> float:
    """The signal-to-quantization-noise ratio of an approximation of `w`,
    `10 log10(sum(w**2) / sum((w - approximation)**2))`, in decibels. Infinite if it is
    exact.
    """
    return total(*_jitted(w, approximation)).sqnr


def square_sums(
    w: Float[Array, "..."], approximation: Float[Array, "..."]
) -> tuple[Float[Array, "*b"], Float[Array, "*b"], Float[Array, ""]]:
    """The sums of each row, for `total`: of the squares of `w`, and of those of its
    errors, both in a unit that keeps them finite; and that unit.

    Each is one loop, for which XLA allocates no array of the size of `w`. A row is
    short enough to be summed in float32.
    """
    wide = jnp.float64 if w.dtype == jnp.float64 else jnp.float32
    w = jnp.atleast_1d(w).astype(wide)
    # Squares of numbers near one stay within float32; powers of two change no digits.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(w), initial=0))
    unit = jnp.ldexp(jnp.ones((), wide), jnp.clip(-exponent, -126, 126))
    errors = w * unit - approximation.astype(wide) * unit
    signal = jnp.sum(jnp.square(w * unit), axis=-1)
    return signal, jnp.sum(jnp.square(errors), axis=-1), unit


_jitted = jax.jit(square_sums)


def total(
    signal: Float[Array, "*b"], noise: Float[Array, "*b"], unit: Float[Array, ""]
) -> SquareSums:
    """The sums over all rows, of what `square_sums` gave."""
    square = float(unit) ** 2
    sums = [float(np.sum(x, dtype=np.float64)) / square for x in (signal, noise)]
    return SquareSums(*sums)
