import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGGUFBytes,
    AbstractGrid,
    round_trip,
    Stored,
)
from .._problem import Problem
from .._table import register_kernel
from ._seconds import predicted


# The kernel for many rows, for products across the blocks, and wherever no other kernel
# applies. By the data sheet of an H200, decoding takes as long as 366 rows of a product
# in bfloat16: the decoded weight is written and read, four bytes for each number, while
# each row of the product takes two operations for each number.


def decoded(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes the whole weight to memory, and leaves the product to XLA. The decoded
    weight is in bfloat16, or in float32 if `x` is."""
    dtype = jnp.float32 if problem.dtype.itemsize == 4 else jnp.bfloat16
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    w = problem.decode(stored).astype(dtype)
    axis = 1 if problem.product == "matmul" else 0
    y = lax.dot_general(
        x.astype(dtype),
        w,
        (((1,), (axis,)), ((), ())),
        preferred_element_type=jnp.float32,
    )
    return y.astype(problem.dtype)


def _supports(problem: Problem) -> str | None:
    if problem.dtype.itemsize > 4:
        return f"computes in float32 at most, got {problem.dtype.name}"
    return None


register_kernel(
    ("matmul", "matmul_transposed"),
    (AbstractGGUFBytes, AbstractGrid),
    "cuda",
    activation=(None, AbstractFormat),
    supports=_supports,
    error=8e-3,
    seconds=predicted(2, 600e12),
)(decoded)
