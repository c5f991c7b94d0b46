from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..formats import Parameters
from ._rounding import Rounding


class Columns(NamedTuple):
    """The operands of least squares for blocks with the error `e H e^T`, `s n g`.

    - `points`: the points of the codes.
    - `weighed`: `points H`.
    - `ones`: `1 H`, which rows may share.
    - `asked`: `e H`, where `e` may include the errors of other blocks.
    """

    points: Float[Array, "s n g"]
    weighed: Float[Array, "s n g"]
    ones: Float[Array, "s _ _"]
    asked: Float[Array, "s n g"]


def refitted(
    rounding: Rounding, parameters: Parameters, columns: Columns
) -> tuple[Parameters, Bool[Array, "_ g"]]:
    """Fits the parameters of blocks, `_ g`, to given codes by least squares, and rounds
    them to values that can be stored. Also returns whether the error is now less:
    rounding the parameters may undo the improvement. A zero-point is kept."""
    scale, offset = parameters
    points, weighed, ones, asked = columns
    sum_of = lambda x: total(x, parameters)
    if rounding.format.grid.offset != "minimum" or offset is None:
        if offset is not None:
            points, weighed = points - offset[None], weighed - offset[None] * ones
        xx, xr = sum_of(weighed * points), sum_of(points * asked)
        best = jnp.where(xx > 0, scale + _divided(xr, xx), scale)
        new = rounding.format.held(Parameters(best, offset))
        step = new.scale - scale
        return new, (step * xx - 2 * xr) * step < 0
    xx, xo, oo = sum_of(weighed * points), sum_of(weighed), sum_of(ones + 0 * points)
    xr, ro = sum_of(points * asked), sum_of(asked)
    determinant = xx * oo - xo**2
    # If all points of a block are equal, they do not determine both scale and minimum:
    # the block keeps its parameters.
    several = determinant > 1e-6 * xx * oo
    step = jnp.where(several, _divided(xr * oo - ro * xo, determinant), 0)
    more = jnp.where(several, _divided(ro * xx - xr * xo, determinant), 0)
    new = rounding.format.held(Parameters(scale + step, offset + more))
    assert new.offset is not None
    step, more = new.scale - scale, new.offset - offset
    change = (step * xx + 2 * more * xo - 2 * xr) * step + (more * oo - 2 * ro) * more
    return new, change < 0


def total(x: Float[Array, "s n g"], parameters: Parameters) -> Float[Array, "_ g"]:
    """Returns the sum over each block, and over all rows if they share parameters."""
    # A product, since XLA sums along a first axis one number at a time.
    s, n, g = x.shape
    sums = jnp.dot(jnp.ones(s, x.dtype), x.reshape(s, n * g)).reshape(n, g)
    shared = parameters.scale.shape[0] == 1
    return jnp.sum(sums, 0, keepdims=True) if shared else sums


def _divided(x, y):
    return x / jnp.where(y == 0, 1, y)
