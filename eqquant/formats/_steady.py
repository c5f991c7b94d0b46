import math

import jax.numpy as jnp
from jaxtyping import Array, Float


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
