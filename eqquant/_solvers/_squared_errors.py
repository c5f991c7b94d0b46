import functools as ft

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@ft.partial(jax.jit, static_argnums=2)
def squared_errors(
    error: Float[Array, "..."],
    gram: Float[Array, "..."] | None,
    axes: tuple[int, ...],
) -> Float[Array, "*lead"]:
    """Returns the sum of the squared errors of products, from the error of a weight:
    one for each matrix of `gram`, or a scalar without a Gram.

    - `gram`: the `value` of an [`eqquant.Gram`][] of the weight. `None` for inputs of
        unit variance.
    - `axes`: the contracted axes, in ascending order, as negative numbers.
    """
    error = error.astype(jnp.float32)
    error = jnp.moveaxis(error, axes, tuple(range(-len(axes), 0)))
    outer = error.shape[: error.ndim - len(axes)]
    if gram is None:
        return jnp.sum(error**2)
    # Rows that share a Gram become one axis: `*lead n k`.
    lead = gram.shape[: len(outer)]
    parts = [size for m, n in zip(lead, outer) for size in (m, n // m)]
    error = error.reshape(*parts, -1)
    where = tuple(range(0, 2 * len(outer), 2))
    error = jnp.moveaxis(error, where, tuple(range(len(outer))))
    error = error.reshape(*lead, -1, error.shape[-1])
    if gram.ndim == len(outer) + 1:
        return jnp.sum(error**2 * gram[..., None, :], (-2, -1))
    with jax.default_matmul_precision("highest"):
        return jnp.sum((error @ gram) * error, (-2, -1))
