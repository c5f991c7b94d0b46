from typing import ClassVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float

from ..formats import Parameters
from ._gram import filled
from ._least_squares import Columns, refitted, total
from ._method import AbstractMethod
from ._rounding import in_blocks, Rounding
from ._search import chosen


class HQQ(AbstractMethod):
    """Half-quadratic quantization: rounds to nearest, with minima by which the sum of
    `|error|**p` of each block is small; or with scales, in a format that has no minima.
    It needs no data. With `p` below one, a few large errors count little, so that
    outliers of a block do less to the other numbers.

    This goes by turns. What the largest errors exceed a threshold by is taken for the
    doing of outliers; and by least squares, the minima or the scales are fitted to
    what remains. The threshold falls from turn to turn, and the best turn counts. (A
    zero-point is stored as an integer: it stays what it is, and scales are fitted.)

    - `p`: the power of errors, above zero and at most one.
    - `steps`: the number of turns.
    - `beta`: how much a squared error counts at first, against a power of it: errors
        are shrunk by `|error|**(p - 1) / beta`. They are in units of the mean absolute
        error of their block.
    - `kappa`: what `beta` is multiplied with in each turn.
    - `search`: whether to begin with the best of many scales instead of those of
        rounding to nearest. Then the sum is much less, and most numbers are nearer to
        what they were, but outliers are cut off. Models may lose by that.

    A Gram matrix, if there is one, is ignored.

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
    """The generalised soft threshold: about the `y` with the least `|y|**p + beta / 2 *
    (y - x)**2`."""
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
