import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ._gram import damped, diagonal, inverse_of_unit, lower_root, normalised


@jax.jit
def mean_of_factors(
    gram: Float[Array, "..."], rows: Float[Array, "*lead"]
) -> Float[Array, "*lead"]:
    """Returns the mean of `D`, where `gram = L D L^T` with `L` unit lower triangular,
    relative to the mean of the diagonal of the Gram. Returns one if only the diagonal
    is given.

    When columns are rounded one after another, and later columns compensate for the
    errors of earlier ones, the remaining error of each column is weighted by `D`. So
    this is the factor by which GPTQ changes the error of products, compared to rounding
    to nearest.

    - `gram`, `rows`: the `value` and the `rows` of an [`eqquant.Gram`][].
    """
    if gram.ndim == rows.ndim + 1:
        return jnp.ones_like(rows)

    def one(gram, root):
        scale = jnp.where(jnp.sum(diagonal(gram)) > 0, 1, 0)
        return scale * jnp.mean(jnp.diagonal(root) ** 2)

    return _of_each(one, gram, rows)


@jax.jit
def inverse_factors(
    gram: Float[Array, "*lead k k"], rows: Float[Array, "*lead"]
) -> Float[Array, "*lead k k"]:
    """Returns `L^-1`, where `gram = L D L^T` with `L` unit lower triangular.

    The error that GPTQ leaves in a row is `z L^-1`, where `z` are the errors of
    rounding each column to its own target. So if `G` is the gradient of the weight,
    `G L^-T` is the gradient with respect to `z`.

    - `gram`, `rows`: the `value` and the `rows` of an [`eqquant.Gram`][].
    """

    def one(_, root):
        return inverse_of_unit(root / jnp.diagonal(root)[None, :])

    return _of_each(one, gram, rows)


def _of_each(one, gram, rows):
    """Maps `one` over normalised Grams and the roots of damped Grams."""
    k = gram.shape[-1]

    def of(given):
        gram, rows = given
        gram = normalised(gram)
        return one(gram, lower_root(damped(gram, rows)))

    with jax.default_matmul_precision("highest"):
        found = lax.map(of, (gram.reshape(-1, k, k), rows.ravel()))
    return found.reshape(*rows.shape, *found.shape[1:])
