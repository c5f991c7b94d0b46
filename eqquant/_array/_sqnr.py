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
    # Three programs, each of one loop, so that XLA allocates no array of the size of w.
    unit = _unit(w)
    signal, noise = _squares(w, np.float32(0), unit), _squares(w, approximation, unit)
    return total(signal, noise, unit).sqnr


def unit_of(w: Float[Array, "..."]) -> Float[Array, ""]:
    """Returns a power of two by which to scale `w`: squares of the products stay within
    float32, and the numbers keep their digits."""
    _, exponent = jnp.frexp(jnp.max(jnp.abs(w.astype(jnp.float32)), initial=0))
    return jnp.ldexp(jnp.float32(1), jnp.clip(-exponent, -126, 126))


def squares_of_rows(
    w: Float[Array, "..."], other: Float[Array, "..."], unit: Float[Array, ""]
) -> Float[Array, "..."]:
    """Returns the sum of the squares of `(w - other) * unit` over each row, which is
    short enough to be summed in float32."""
    wide = jnp.float64 if w.dtype == jnp.float64 else jnp.float32
    unit = unit.astype(wide)
    difference = jnp.atleast_1d(w.astype(wide) * unit - other.astype(wide) * unit)
    return jnp.sum(jnp.square(difference), axis=-1)


_unit, _squares = jax.jit(unit_of), jax.jit(squares_of_rows)


def total(
    signal: Float[ArrayLike, "..."], noise: Float[ArrayLike, "..."], unit: ArrayLike
) -> SquareSums:
    """Returns the sums over all rows."""
    square = float(np.asarray(unit)) ** 2
    sums = (float(np.sum(np.asarray(x), dtype=np.float64)) for x in (signal, noise))
    return SquareSums(*(x / square for x in sums))
