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
    """The mean of `D`, where `gram = L D L^T` with `L` unit lower triangular, relative
    to the mean of the diagonal of the Gram; one, if only the diagonal is given.

    If columns are rounded one after another, such that those to come make up for the
    errors of those before, then what is left of the error is `D`: so this is by how
    much GPTQ divides the error of products of rounding to nearest.

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
