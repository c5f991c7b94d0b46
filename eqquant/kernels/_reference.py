from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ..formats import round_trip, Stored
from ._by_rows import by_rows
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
    return by_rows(decoded_dot(lax.Precision.HIGHEST), x, stored, problem, size)


def decoded_dot(
    precision: lax.Precision | None,
) -> Callable[[Array, Stored, Problem], Array]:
    """Returns the product with a weight that is decoded to the dtype of `x`. It
    accumulates in float32, or in float64 if `x` has that dtype."""

    def dot(x, stored, problem):
        wide = x.dtype if x.dtype.itemsize > 4 else jnp.float32
        w = problem.decode(stored).astype(x.dtype)
        contract = ((1,), (1 if problem.product == "matmul" else 0,))
        return lax.dot_general(
            x, w, (contract, ((), ())), precision, preferred_element_type=wide
        )

    return dot
