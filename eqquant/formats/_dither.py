import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


def dither(x: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Pseudo-random numbers of more than -1/2 and up to 1/2, by the bits of each number
    in float32."""
    # The constants are those of MurmurHash3's finalizer.
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        bits = (bits ^ (bits >> np.uint32(shift))) * np.uint32(factor)
    return 0.5 - (bits >> np.uint32(8)).astype(jnp.float32) * np.float32(2.0**-24)
