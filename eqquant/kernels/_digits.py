import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float


# Kernels that multiply 8-bit integers split each input into two digits of 8 bits, in a
# unit that its whole row shares. The unit is a 127th of the largest input that has
# digits, so a few large inputs would make it too coarse for the others. These are
# outliers, which get no digits and are multiplied in another way.
#
# The error. The second digit counts 254ths of the unit, so rounding to it is off by at
# most a 508th of the unit. The largest input that is not an outlier is at most 64 times
# the geometric mean of the row. Each input is therefore off by at most
# `64 / (127 * 508)` of the geometric mean, which is at most the arithmetic mean of
# `|x|`. The errors of a product add up to at most the same fraction of
# `mean(|x|) * sum(|w|)`. This is at most `|x| |w|` if larger inputs do not meet smaller
# weights, which is the condition `provided`.
error = 1e-3
provided = "the weights are on average no smaller where the inputs are larger"

# The threshold, in powers of two above the mean: 6 less a margin. The bits of a float
# are its logarithm, interpolated linearly between powers of two; the margin covers this
# interpolation, and roundings.
_orders = np.float32(5.9)


def outliers(x: Float[Array, "m k"]) -> Bool[Array, "m k"]:
    """Returns which inputs are above about 60 times the geometric mean of their row, or
    not finite. Zeros do not count in the mean."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    exponent = bits >> 23
    counts = ((exponent > 0) & (exponent < 255)).astype(jnp.float32)
    number = jnp.sum(counts, axis=1, keepdims=True)
    mean = jnp.sum(exponent.astype(jnp.float32) * counts, axis=1, keepdims=True)
    mean = mean / jnp.maximum(number, 1)
    # Non-negative floats compare like their bits.
    first = jnp.minimum(mean + _orders, 255) * np.float32(2**23)
    return bits >= first.astype(jnp.int32)
