from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float

from ..formats import Parameters
from ._rounding import Rounding, total


def refitted(
    rounding: Rounding,
    points: Float[Array, "n g s"],
    parameters: Parameters,
    target: Float[Array, "n g s"],
    weigh: Callable[[Float[Array, "n g s"]], Float[Array, "n g s"]],
) -> Parameters:
    """The parameters with which points come nearest to some numbers `w`, as they are
    stored. A zero-point stays what it is.

    **Arguments:**

    - `weigh`: maps `x` to `x H`, where `e H e^T` is the error of a block.
    - `target`: `w H`.
    """
    scale, offset = parameters
    sum_of = lambda x: total(x, parameters)
    kind = rounding.format.grid.offset
    if kind != "minimum" or offset is None:
        x = points if offset is None else points - offset
        square = sum_of(weigh(x) * x)
        best = _divided(sum_of(target * x), square)
        new = Parameters(jnp.where(square > 0, best, scale), offset)
        return rounding.format.held(new)
    one = jnp.ones_like(points)
    weighed, ones = weigh(points), weigh(one)
    xx, xo, oo = sum_of(weighed * points), sum_of(weighed), sum_of(ones)
    xt, ot = sum_of(points * target), sum_of(target)
    determinant = xx * oo - xo**2
    # Where all points of a block are one, only the minimum follows from them.
    several = determinant > 1e-6 * xx * oo
    best = _divided(xt * oo - ot * xo, determinant)
    low = _divided(ot * xx - xt * xo, determinant)
    new = Parameters(jnp.where(several, best, scale), jnp.where(several, low, offset))
    return rounding.format.held(new)


def _divided(x, y):
    return x / jnp.where(y == 0, 1, y)
