import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...formats import AbstractFormat, round_trip, Stored
from .._by_rows import by_rows
from .._problem import Problem
from .._reference import decoded_dot
from .._table import register_kernel
from ._seconds import predicted


# This kernel is for many rows, for products across the blocks, and for all products to
# which no other kernel applies. On an H100, decoding takes as long as 400 rows of a
# product in bfloat16: writing and reading the decoded weight moves four bytes for each
# number, while a row of the product takes two operations for each.

# The largest number of bytes of a decoded part, and the least number of parts of a
# weight. XLA may write a part in float32 first: together they take at most 32 MB, or
# three sixteenths of the bytes of the decoded weight.
_most_bytes = 10 * 2**20
_parts = 16
# A decoded weight of at most this many bytes is not worth a loop.
_few_bytes = 2**20


def decoded(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes some rows of the weight at a time to memory, a sixteenth of them or 10
    MB, and leaves the product to XLA. They are decoded to bfloat16, or to float32 if
    `x` is in that."""
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    wide = problem.dtype.itemsize == 4 or problem.highest
    x = x.astype(jnp.float32 if wide else jnp.bfloat16)
    precision = lax.Precision.HIGHEST if problem.highest else None
    size = _rows(problem, x.dtype.itemsize)
    return by_rows(decoded_dot(precision), x, stored, problem, size)


def _rows(problem, itemsize):
    width = max(1, problem.k * problem.stack * itemsize)
    if problem.n * width <= _few_bytes:
        return max(1, problem.n)
    return max(1, min(-(-problem.n // _parts), _most_bytes // width))


_by_rates = predicted(2, 0.6)


def _seconds(problem: Problem) -> float:
    # Three programs run for each part, to decode, multiply and store. A GPU takes a few
    # microseconds to start each.
    parts = -(-problem.n // _rows(problem, problem.dtype.itemsize)) if problem.n else 0
    return _by_rates(problem) + 3 * 3e-6 * parts


def _supports(problem: Problem) -> str | None:
    if problem.dtype.itemsize > 4:
        return f"supports dtypes up to float32, got {problem.dtype.name}"
    if problem.composite:
        return "decodes composite formats directly, not by way of their base"
    return None


register_kernel(
    ("matmul", "matmul_transposed"),
    AbstractFormat,
    ("cuda", "rocm"),
    activation=(None, AbstractFormat),
    supports=_supports,
    error=lambda problem: 1e-5 if problem.highest else 8e-3,
    seconds=_seconds,
)(decoded)
