from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from ..formats import Parameters
from ._rounding import Rounding


class Columns(NamedTuple):
    """What least squares asks about blocks whose error is `e H e^T`, `s n g`.

    - `points`: the points of the codes.
    - `weighed`: `points H`.
    - `ones`: `1 H`, which may be the same for all rows.
    - `asked`: `e H`, where `e` may be that of other blocks, too.
    """

    points: Float[Array, "s n g"]
    weighed: Float[Array, "s n g"]
    ones: Float[Array, "s _ _"]
    asked: Float[Array, "s n g"]


def refitted(
    rounding: Rounding, parameters: Parameters, columns: Columns
) -> tuple[Parameters, Bool[Array, "_ g"]]:
    """The parameters, `_ g`, with which the error of codes is the least, as they are
    stored, and whether it is less than before: rounding the parameters may undo it. A
    zero-point stays what it is."""
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
    # Where all points of a block are one, only the minimum follows from them.
    several = determinant > 1e-6 * xx * oo
    step = jnp.where(several, _divided(xr * oo - ro * xo, determinant), 0)
    more = jnp.where(several, _divided(ro * xx - xr * xo, determinant), 0)
    new = rounding.format.held(Parameters(scale + step, offset + more))
    assert new.offset is not None
    step, more = new.scale - scale, new.offset - offset
    change = (step * xx + 2 * more * xo - 2 * xr) * step + (more * oo - 2 * ro) * more
    return new, change < 0


def total(x: Float[Array, "s n g"], parameters: Parameters) -> Float[Array, "_ g"]:
    """The sum over each block; over all rows, if these share their parameters."""
    # (By a product: XLA sums along a first axis one number at a time.)
    s, n, g = x.shape
    sums = jnp.dot(jnp.ones(s, x.dtype), x.reshape(s, n * g)).reshape(n, g)
    shared = parameters.scale.shape[0] == 1
    return jnp.sum(sums, 0, keepdims=True) if shared else sums


def _divided(x, y):
    return x / jnp.where(y == 0, 1, y)
