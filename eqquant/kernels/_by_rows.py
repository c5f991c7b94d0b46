import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..formats import Stored
from ._problem import Problem


def by_rows(
    product: Callable[[Array, Stored, Problem], Array],
    x: Float[Array, "m _"],
    stored: Stored,
    problem: Problem,
    size: int,
) -> Float[Array, "m _"]:
    """Multiplies with `size` rows of the weight at a time, or the next larger number
    that can be stored alone.

    `product` computes the product with some rows, whose number is `n` of the problem
    that it gets. Products that are summed up should be in float32, or in float64 if `x`
    has that dtype.
    """
    together = problem.format.rows_together
    size = -(-size // together) * together
    n, forward = problem.n, problem.product == "matmul"
    if size >= n:
        return product(x, stored, problem).astype(problem.dtype)

    def step(start, size, y):
        tile = jtu.tree_map(lambda a: _rows(a, problem, start, size), stored)
        some = dataclasses.replace(problem, n=size)
        # The rows of the weight are columns of the result of one product, and the
        # contracted axis of the other.
        if forward:
            new = product(x, tile, some).astype(y.dtype)
            return lax.dynamic_update_slice_in_dim(y, new, start, axis=1)
        each = lax.dynamic_slice_in_dim(x, start, size, axis=1)
        return y + product(each, tile, some)

    if forward:
        y = lax.full_like(x, 0, problem.dtype, (x.shape[0], n))
    else:
        wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
        y = lax.full_like(x, 0, wide, (x.shape[0], problem.k))
    y = lax.fori_loop(0, n // size, lambda i, y: step(i * size, size, y), y)
    if n % size != 0:
        y = step(n - n % size, n % size, y)
    return y.astype(problem.dtype)


def _rows(a: Shaped[Array, "_ _"], problem: Problem, start, size: int) -> Array:
    """Returns the part of a stored array that belongs to some rows of the weight."""
    if a.shape[problem.row_axis] != problem.n:
        return a  # shared by all rows
    return lax.dynamic_slice_in_dim(a, start, size, problem.row_axis)
