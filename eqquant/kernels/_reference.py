import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Shaped

from ..formats import round_trip, Stored
from ._problem import Problem


# The number of elements of a weight that are decoded at a time: 512 kB of float32. A
# weight of at most half this size is decoded at once.
_tile = 2**17


def reference(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes some rows of the weight at a time, and multiplies in float32. Applies to
    every format, size and platform.

    The errors of all other kernels are measured against this product. Only a small
    weight is ever decoded as a whole.
    """
    # Uses float32 even for narrow inputs, and float64 for inputs in float64.
    wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
    x = x.astype(wide)
    if problem.activation is not None:
        x = round_trip(x, problem.activation).astype(wide)
    # The rows of all stacked weights are decoded side by side, under `vmap`.
    width = problem.k * problem.stack
    if problem.n * width <= _tile // 2:
        size = problem.n
    else:
        size = min(max(8, _tile // width), -(-problem.n // 4))
    return by_rows(x, stored, problem, size, lax.Precision.HIGHEST)


def by_rows(
    x: Float[Array, "m _"],
    stored: Stored,
    problem: Problem,
    size: int,
    precision: lax.Precision | None,
) -> Float[Array, "m _"]:
    """Decodes `size` rows of the weight at a time, or the next larger number that can
    be decoded alone, to the dtype of `x`, and accumulates products in float32, or in
    float64 if `x` has that dtype."""
    together = problem.format.rows_together
    size = -(-size // together) * together
    n, wide = problem.n, x.dtype if x.dtype.itemsize > 4 else jnp.float32
    forward = problem.product == "matmul"

    def dot(x, stored):
        w = problem.decode(stored).astype(x.dtype)
        contract = ((1,), (1 if forward else 0,))
        return lax.dot_general(
            x, w, (contract, ((), ())), precision, preferred_element_type=wide
        )

    def step(start, size, y):
        tile = jtu.tree_map(lambda a: _rows(a, problem, start, size), stored)
        # The rows of the weight are columns of the result of one product, and the
        # contracted axis of the other.
        if forward:
            new = dot(x, tile).astype(y.dtype)
            return lax.dynamic_update_slice_in_dim(y, new, start, axis=1)
        return y + dot(lax.dynamic_slice_in_dim(x, start, size, axis=1), tile)

    if size >= n:
        return dot(x, stored).astype(problem.dtype)
    if forward:
        y = lax.full_like(x, 0, problem.dtype, (x.shape[0], n))
    else:
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
