import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ._gram import damped, diagonal, lower_root, normalised


@ft.partial(jax.jit, static_argnums=2)
def mean_of_factors(
    gram: Float[Array, "..."],
    rows: Float[Array, "*lead"],
    damping: float = 0.01,
) -> Float[Array, "*lead"]:
    """Returns the mean of `D`, where `gram = L D L^T` with `L` unit lower triangular,
    relative to the mean of the diagonal of the Gram. Returns one if only the diagonal
    is given.

    When columns are rounded one after another, and later columns compensate for the
    errors of earlier ones, the remaining error of each column is weighted by `D`. So
    this is the factor by which GPTQ changes the error of products, compared to rounding
    to nearest.

    **Arguments:**

    - `gram`, `rows`: the `value` and the `rows` of an [`eqquant.Gram`][].
    """
    if gram.ndim == rows.ndim + 1:
        return jnp.ones_like(rows)
    k = gram.shape[-1]

    def one(given):
        gram, rows = given
        gram = normalised(gram)
        root = lower_root(damped(gram, damping, rows))
        scale = jnp.where(jnp.sum(diagonal(gram)) > 0, 1, 0)
        return scale * jnp.mean(jnp.diagonal(root) ** 2)

    with jax.default_matmul_precision("highest"):
        found = lax.map(one, (gram.reshape(-1, k, k), rows.ravel()))
    return found.reshape(rows.shape)
