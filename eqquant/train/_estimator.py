import jax
from jaxtyping import Array, Float


@jax.custom_jvp
def estimate(
    value: Float[Array, "*s"], surrogate: Float[Array, "*s"]
) -> Float[Array, "*s"]:
    """`value`, with the derivatives of `surrogate`. The value is exact: the common
    `surrogate + stop_gradient(value - surrogate)` rounds twice."""
    del surrogate
    return value


@estimate.defjvp
def _jvp(primals, tangents):
    value, surrogate = primals
    _, tangent = tangents
    return estimate(value, surrogate), tangent
