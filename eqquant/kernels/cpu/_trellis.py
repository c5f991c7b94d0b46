import jax.numpy as jnp
from jaxtyping import Array, Float

from ...formats import AbstractFormat, Stored, Trellis
from .._problem import Problem, rounded_inputs
from .._table import register_kernel
from ._codes import refuse_layout
from ._costs import measured
from ._tiles import after, dot, number_of_tiles


# XLA decodes a full vector of rows at a time if their number is this, or a multiple.
_together = 64


@register_kernel(
    ("matmul", "matmul_transposed"),
    Trellis,
    activation=(None, AbstractFormat),
    supports=refuse_layout,
    seconds=measured("trellis_tiles"),
)
def trellis_tiles(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes some rows of the weight at a time to float32, and multiplies in
    float32."""
    format, k = problem.format, problem.k
    assert isinstance(format, Trellis)
    x = rounded_inputs(x, problem)
    forward = problem.product == "matmul"
    number = number_of_tiles(problem.n * k * problem.stack, 4)
    size = -(-problem.n // (number * _together)) * _together
    later, parts = stored, []
    for start in range(0, problem.n, size):
        rows = slice(start, start + size)
        some = {name: a[:, rows] for name, a in later.items()}
        scale = format.scales(some, problem.tail)
        w = format.to_points(some["codes"])[:k] * scale
        part = dot(x, w, 0) if forward else dot(x[:, rows], w, 1)
        if parts and not forward:
            part = parts.pop() + part
        # One after another, so that only one tile is in memory at a time.
        later, part = after(stored, part)
        parts.append(part)
    return jnp.concatenate(parts, axis=1).astype(problem.dtype)
