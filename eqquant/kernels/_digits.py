import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float


# Inputs as two digits of 8 bits each, of a unit of their row. The largest of them says
# how small that can be: so what is much larger than the others has no digits, and is
# multiplied in another way.
#
# An input errs by at most a 508th of the unit, which is a 127th of the largest that has
# digits. That is at most 64 times the geometric mean of the row, so that the error is
# at most `64 / (127 * 508)` of this mean times the sum of the weights; and the mean is
# at most the arithmetic one.
error = 1e-3
provided = "the weights are on average no smaller where the inputs are larger"

# Binary orders of magnitude. One part in 16 is for steps in between, which are as long
# as each other here, and for roundings.
_orders = np.float32(5.9)


def outliers(x: Float[Array, "m k"]) -> Bool[Array, "m k"]:
    """Which inputs are more than some 60 times the geometric mean of their row, or not
    finite. Zeros do not count in the mean."""
    bits = lax.bitcast_convert_type(jnp.abs(x), jnp.int32)
    exponent = bits >> 23
    counts = ((exponent > 0) & (exponent < 255)).astype(jnp.float32)
    number = jnp.sum(counts, axis=1, keepdims=True)
    mean = jnp.sum(exponent.astype(jnp.float32) * counts, axis=1, keepdims=True)
    mean = mean / jnp.maximum(number, 1)
    # The order of floats is that of their bits.
    first = jnp.minimum(mean + _orders, 255) * np.float32(2**23)
    return bits >= first.astype(jnp.int32)
