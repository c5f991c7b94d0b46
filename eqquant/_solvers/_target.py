import functools as ft

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ._gram import damped, diagonal, lower_root


def target(
    w: Float[Array, "*b n k"],
    gram: Float[Array, "*b k k"],
    rows: Float[Array, "*b"] | None,
    cross: Float[Array, "*b k k"],
    mix: float,
    damping: float = 0.01,
) -> Float[Array, "*b n k"]:
    """The matrix whose products with inputs `y` come nearest to those of a matrix with
    inputs `x`, mixed with the matrix itself.

    **Arguments:**

    - `gram`: the sum of `y^T y`.
    - `rows`: how many rows that is a sum over.
    - `cross`: the sum of `x^T y`.
    - `mix`: how much of the former matrix there is.
    - `damping`: what is added to the diagonal of the Gram, in units of its mean.
    """

    @ft.partial(jnp.vectorize, signature="(n,k),(k,k),(k,k),()->(n,k)")
    def solve(w, gram, cross, rows):
        mean = jnp.mean(diagonal(gram))
        unit = jnp.where(mean > 0, mean, 1)
        factor = lower_root(damped(gram / unit, damping, rows))
        missing = (w @ ((cross - gram) / unit)).T
        half = lax.linalg.triangular_solve(factor, missing, left_side=True, lower=True)
        found = lax.linalg.triangular_solve(
            factor, half, left_side=True, lower=True, transpose_a=True
        )
        return w + mix * found.T

    # (As many rows as there are inputs add nothing to the damping.)
    rows = jnp.float32(gram.shape[-1]) if rows is None else rows
    with jax.default_matmul_precision("highest"):
        return solve(w.astype(jnp.float32), gram, cross, rows)
