import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from ...formats import AbstractFormat, round_trip, Stored, Trellis
from .._problem import Problem
from .._table import register_kernel
from ._codes import refuse_layout
from ._tiles import number_of_tiles, side_by_side


@register_kernel(
    ("matmul", "matmul_transposed"),
    Trellis,
    activation=(None, AbstractFormat),
    supports=refuse_layout,
)
def trellis_tiles(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes some rows of the weight at a time to float32, or some of the tiles of
    all, and multiplies in float32."""
    format = problem.format
    assert isinstance(format, Trellis)
    x = x.astype(jnp.float32)
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    words, k, n = stored["codes"], problem.k, problem.n
    scale = format.scales(stored, problem.tail)
    number = number_of_tiles(n * k * problem.stack, 4)

    def of_rows(words, start, size):
        some = lambda a: lax.dynamic_slice_in_dim(a, start, size, axis=1)
        return _dot(x, format.to_points(some(words))[:k] * some(scale), 0)

    if problem.product == "matmul":
        return side_by_side(of_rows, words, n, -(-n // number)).astype(problem.dtype)

    each = format.tile * format.bits // 32
    whole, parts = words.shape[0] // each, []

    def of_tiles(words, start, size):
        some = lax.dynamic_slice_in_dim(words, start * each, size * each)
        return _dot(x, format.to_points(some) * scale, 1)

    if whole > 0:
        parts.append(side_by_side(of_tiles, words, whole, -(-whole // number)))
    if words.shape[0] > whole * each:
        parts.append(_dot(x, format.to_points(words[whole * each :]) * scale, 1))
    return jnp.concatenate(parts, axis=1)[:, :k].astype(problem.dtype)


def _dot(x, w, axis):
    contract = (((1,), (axis,)), ((), ()))
    return lax.dot_general(x, w, contract, precision=lax.Precision.HIGHEST)
