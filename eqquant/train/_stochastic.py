import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, UInt32

from ..formats import AbstractFormat, as_format
from ._points import as_rounding, largest


def _as_random(format: AbstractFormat | str) -> AbstractFormat:
    format = as_rounding(as_format(format))
    largest(format)  # Raises if the format is not a scale times a grid.
    return format


class Stochastic(eqx.Module):
    """Stochastic rounding to a format: each number becomes one of its two neighbouring
    points, at random, with the number itself as the mean. The scales are those of the
    format.

    The random numbers are a hash of the position in the array and of all the bits of
    the array that is rounded. So there is no key to pass on, two steps of a training
    round differently, and the same step repeated, recomputed by `jax.checkpoint`, or
    sharded otherwise, rounds alike.

    - `format`: a format, or its name, that is a scale times a grid.

    !!! Example

        ```python
        backward = eqquant.train.Stochastic("int8")
        model = eqquant.train.tree_compute(model, backward=backward)
        ```

    ??? cite "Reference"

        Deep Learning with Limited Numerical Precision. Gupta et al., 2015. Section 3.1.
    """

    format: AbstractFormat = eqx.field(static=True, converter=_as_random)


def dither(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Returns numbers that are uniform in `[0, 1)`, one for each number of `x`, in
    float32. They depend on the bits of `x` alone."""
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint32)
    position = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
        step = lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        position = position * np.uint32(size % 2**32) + step
    mark = position * np.uint32(0x9E3779B9)
    # (Integer sums wrap around, and do not depend on the order of summation.)
    seed = _hash(jnp.sum(bits ^ mark, dtype=jnp.uint32))
    random = _hash(mark + seed)
    return (random >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)


def _hash(x: UInt32[Array, "*s"]) -> UInt32[Array, "*s"]:
    # "lowbias32" of https://nullprogram.com/blog/2018/07/31/, whose bits each depend on
    # every bit of `x`.
    x = (x ^ x >> np.uint32(16)) * np.uint32(0x7FEB352D)
    x = (x ^ x >> np.uint32(15)) * np.uint32(0x846CA68B)
    return x ^ x >> np.uint32(16)


def at_random(
    unit: Float[Array, "*s"],
    noise: Float[Array, "*s"],
    mantissa: int = 0,
    least: int | None = None,
) -> Float[Array, "*s"]:
    """Rounds to one of the two neighbouring integers; or, with a `least` exponent, to
    floating-point numbers with `mantissa` bits of mantissa. Exact, with `noise` that is
    uniform in `[0, 1)`."""
    if least is None:
        return jnp.floor(unit + noise)
    exponent = (lax.bitcast_convert_type(jnp.abs(unit), jnp.int32) >> 23) - 127
    exponent = jnp.maximum(exponent, least) - mantissa
    power = lambda e: lax.bitcast_convert_type((e + 127) << 23, jnp.float32)
    return jnp.floor(unit * power(-exponent) + noise) * power(exponent)
