from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float

from ..formats import Parameters
from ._least_squares import refitted
from ._rounding import Rounding, total


class Search(NamedTuple):
    """A search for the parameters of blocks, by the squares of errors.

    - `blocks`: the numbers.
    - `weights`: what the square of each error counts.
    """

    rounding: Rounding
    blocks: Float[Array, "n g s"]
    weights: Float[Array, "_ g s"]

    def losses(self, parameters: Parameters) -> Float[Array, "_ g 1"]:
        """The sum of squares of each block."""
        error = self.blocks - self.rounding.nearest(self.blocks, parameters)
        return total(self.weights * error**2, parameters)

    def best(self, number: int = 1, steps: int = 3) -> Parameters:
        """The best of all candidates, after so many steps of least squares: of the
        scales for the codes, and of the codes for these scales. Each `number _ g 1`,
        with the best candidates as they were behind."""
        found = self.rounding.candidates(self.blocks)
        losses = lax.map(self.losses, found)
        order = jnp.argsort(losses, axis=0)[:number]
        found = _map(lambda a: jnp.take_along_axis(a, order, 0), found)
        first = _map(lambda a: a[0], found)
        loss = jnp.min(losses, axis=0)
        step = lambda _, state: self._step(*state)
        first, _ = lax.fori_loop(0, steps, step, (first, loss))
        return _map(lambda a, f: jnp.concatenate([f[None], a])[:number], found, first)

    def _step(self, parameters, loss):
        points = self.rounding.points(self.rounding.codes(self.blocks, parameters))
        weigh = lambda x: self.weights * x
        target = weigh(self.blocks)
        new = refitted(self.rounding, points, parameters, target, weigh)
        new_loss = self.losses(new)
        return chosen(new_loss < loss, (new, new_loss), (parameters, loss))


def chosen(where, these, others):
    """The arrays of one tree or of another, block by block."""
    return _map(lambda a, b: jnp.where(where, a, b), these, others)


_map = jtu.tree_map
