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
    """Interpolates between `w` and the matrix whose products with inputs `y` best
    approximate the products of `w` with inputs `x`.

    - `gram`: the sum of `y^T y` over rows of inputs.
    - `rows`: the number of these rows.
    - `cross`: the sum of `x^T y` over the same rows.
    - `mix`: the weight of the best approximation: zero returns `w`.
    - `damping`: added to the diagonal of the Gram, in units of its mean.
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

    # With at least as many rows as inputs, `damped` does not increase the damping.
    rows = jnp.float32(gram.shape[-1]) if rows is None else rows
    with jax.default_matmul_precision("highest"):
        return solve(w.astype(jnp.float32), gram, cross, rows)
