from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float

from .._array import check_number
from ..formats import Parameters
from ._gram import filled
from ._least_squares import Columns, refitted, total
from ._method import AbstractMethod
from ._rounding import in_blocks, Rounding
from ._search import chosen


class HQQ(AbstractMethod):
    """Half-quadratic quantization: rounds to nearest, with minima that reduce the sum
    of `|error|**p` of each block, or with such scales in a format without minima. It
    needs no data. With `p` below one, large errors count less, so that outliers of a
    block do less harm to its other numbers.

    The algorithm is iterative. In each step, the amount by which errors exceed a
    threshold is attributed to outliers, and the minima or scales are fitted to the
    remainder by least squares. The threshold falls from step to step, and the best step
    is returned. (A zero-point is stored as an integer, so it is kept, and scales are
    fitted instead.)

    - `p`: the exponent of errors, above zero and at most one.
    - `steps`: the number of steps.
    - `beta`: the initial weight of the quadratic penalty: errors are shrunk by
        `|error|**(p - 1) / beta`, in units of the mean absolute error of their block.
    - `kappa`: the factor by which `beta` grows in each step.
    - `search`: whether to start from the best of many scales instead of the scales for
        rounding to nearest. The sum is then much smaller, and most numbers are rounded
        more accurately, but outliers are clipped, which may harm the model.

    A Gram matrix is ignored.

    !!! Example

        ```python
        model = eqquant.tree_quantize(model, "int4", method=eqquant.HQQ())
        ```

    ??? cite "Reference"

        Half-Quadratic Quantization of Large Machine Learning Models. Badri & Shaji,
        2023.
    """

    p: float = eqx.field(default=0.7, static=True)
    steps: int = eqx.field(default=20, static=True)
    beta: float = eqx.field(default=1.0, static=True)
    kappa: float = eqx.field(default=1.05, static=True)
    search: bool = eqx.field(default=False, static=True)
    needs_gram: ClassVar[bool] = False

    def __check_init__(self):
        check_number("steps", self.steps, whole=True)
        for name in ("p", "beta", "kappa"):
            check_number(name, getattr(self, name))
        if not 0 < self.p <= 1:
            raise ValueError(f"`p` should be above 0 and at most 1. Got {self.p}.")
        if self.steps < 0:
            raise ValueError(f"`steps` should not be negative. Got {self.steps}.")
        if self.beta <= 0:
            raise ValueError(f"`beta` should be positive. Got {self.beta}.")
        if self.kappa < 1:
            raise ValueError(f"`kappa` should be at least 1. Got {self.kappa}.")

    def choose(self, w, format, gram, rows, parameters):
        del gram, rows
        rounding = Rounding(format)
        blocks = in_blocks(w, format)
        if parameters is None:
            _, number, size = blocks.shape
            weights = filled(jnp.ones_like(w[0]), number * size)
            weights = weights.reshape(1, number, size)
            columns, weights = (jnp.moveaxis(a, -1, 0) for a in (blocks, weights))
            found = self._best(rounding, columns, weights)
            parameters = jtu.tree_map(lambda a: a[..., None], found)
        return rounding.codes(blocks, parameters), parameters

    def losses(self, error, gram):
        return jnp.sum(self._powers(error), -1)

    def _powers(self, error):
        return jnp.abs(error) ** self.p

    def _best(self, rounding, columns, weights) -> Parameters:
        def losses(parameters):
            _, number = rounding.column(columns, parameters)
            return total(weights * self._powers(columns - number), parameters)

        found = rounding.candidates(jnp.moveaxis(columns, 0, -1))
        found = jtu.tree_map(lambda a: a[..., 0], found)
        first = jtu.tree_map(lambda a: a[0], found)
        if self.search:
            order = jnp.argmin(lax.map(losses, found), 0)[None]
            first = jtu.tree_map(lambda a: jnp.take_along_axis(a, order, 0)[0], found)
        _, number = rounding.column(columns, first)
        error = jnp.abs(columns - number)
        mean = total(weights * error, first) / total(weights + 0 * error, first)
        unit = jnp.where(mean == 0, 1, mean)[None]

        def turn(i, state):
            parameters, best, loss = state
            codes, number = rounding.column(columns, parameters)
            beta = self.beta * self.kappa ** i.astype(jnp.float32)
            error = columns - number
            outlying = unit * _shrunk(error / unit, beta, self.p)
            points = rounding.points(codes)
            new = _fitted(rounding, points, parameters, columns - outlying, weights)
            new_loss = losses(new)
            best = chosen(new_loss < loss, (new, new_loss), (best, loss))
            return (new, *best)

        state = (first, first, losses(first))
        return lax.fori_loop(0, self.steps, turn, state)[1]


def _shrunk(
    x: Float[Array, "s n g"], beta: Float[Array, ""], p: float
) -> Float[Array, "s n g"]:
    """Applies the generalised soft threshold, which approximates the minimiser `y` of
    `|y|**p + beta / 2 * (y - x)**2`."""
    size = jnp.abs(x)
    return jnp.sign(x) * jnp.maximum(size - size ** (p - 1) / beta, 0)


def _fitted(rounding, points, parameters, target, weights):
    scale, offset = parameters
    if rounding.format.grid.offset != "minimum" or offset is None:
        p = jtu.tree_map(lambda a: a[None], parameters)
        error = target - rounding.format.grid.numbers(points, *p)
        columns = Columns(points, weights * points, weights, weights * error)
        return refitted(rounding, parameters, columns)[0]
    left = target - points * scale[None]
    count = total(weights + 0 * left, parameters)
    low = total(weights * left, parameters) / count
    return rounding.format.held(Parameters(scale, low))
