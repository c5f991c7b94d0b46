from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float

from ..formats import Parameters
from ._least_squares import Columns, refitted
from ._rounding import Rounding


# So many numbers are computed at a time: they stay in a cache.
_numbers = 2**14


class Search(NamedTuple):
    """A search for the parameters of blocks, by the squares of errors.

    - `columns`: the numbers; those at one place of all blocks are next to each other.
    - `weights`: what the square of each error counts.
    """

    rounding: Rounding
    columns: Float[Array, "s n g"]
    weights: Float[Array, "s _ g"]

    def losses(self, parameters: Parameters) -> Float[Array, "c _ g"]:
        """The sum of squares of each block, for each of the parameters, `c _ g`."""
        s, n, g = self.columns.shape
        shape = (parameters.scale.shape[0], n, g)

        def add(i, sums):
            x = jnp.broadcast_to(self.columns[i][None], shape)
            _, number = self.rounding.column(x, parameters)
            return sums + self.weights[i][None] * (x - number) ** 2

        sums = lax.fori_loop(0, s, add, jnp.zeros(shape, jnp.float32))
        shared = parameters.scale.shape[1] == 1
        return jnp.sum(sums, 1, keepdims=True) if shared else sums

    def best(self, number: int = 1, steps: int = 3) -> Parameters:
        """The best of all candidates, after so many steps of least squares: of the
        scales for the codes, and of the codes for these scales. Each `number _ g`,
        with the best candidates as they were behind."""
        _, n, g = self.columns.shape
        found = self.rounding.candidates(jnp.moveaxis(self.columns, 0, -1))
        found = _map(lambda a: a[..., 0], found)
        losses = in_groups(self.losses, found, _numbers // (n * g))
        found = _first(found, losses, number)
        step = lambda _, parameters: self._step(parameters)
        first = lax.fori_loop(0, steps, step, _map(lambda a: a[0], found))
        return _map(lambda a, f: jnp.concatenate([f[None], a])[:number], found, first)

    def _step(self, parameters):
        codes, number = self.rounding.column(self.columns, parameters)
        points = self.rounding.points(codes)
        columns = Columns(
            points,
            self.weights * points,
            self.weights,
            self.weights * (self.columns - number),
        )
        new, better = refitted(self.rounding, parameters, columns)
        return chosen(better, new, parameters)


def chosen(where, these, others):
    """The arrays of one tree or of another, block by block."""
    return _map(lambda a, b: jnp.where(where, a, b), these, others)


def in_groups(fn, xs, most: int):
    """`fn` of the leading axis of arrays, at most so many at once, or one."""
    number = len(_leaves(xs)[0])
    found = lax.map(fn, grouped(xs, most))
    return _map(lambda a: a.reshape(-1, *a.shape[2:])[:number], found)


def grouped(xs, most: int):
    """The leading axis of arrays in groups of at most so many, or of one. The last of
    all fills up the last group."""
    number = len(_leaves(xs)[0])
    groups = -(-number // max(most, 1))
    size = -(-number // groups)

    def group(a):
        more = jnp.repeat(a[-1:], groups * size - number, 0)
        return jnp.concatenate([a, more]).reshape(groups, size, *a.shape[1:])

    return _map(group, xs)


def _first(found, losses, number):
    """The parameters with the least losses, in order."""
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    index = jnp.arange(len(losses)).reshape(-1, 1, 1)

    # (XLA's sort takes far longer for many short rows.)
    def count(i, rank):
        one = losses[i][None]
        less = (one < losses) | ((one == losses) & (i < index))
        return rank + less.astype(rank.dtype)

    rank = lax.fori_loop(0, len(losses), count, jnp.zeros(losses.shape, jnp.int32))
    places = jnp.arange(number, dtype=jnp.int32).reshape(-1, 1, 1)

    def put(i, first):
        return chosen(rank[i][None] == places, _map(lambda a: a[i][None], found), first)

    like = lambda a: jnp.zeros((number, *a.shape[1:]), a.dtype)
    return lax.fori_loop(0, len(losses), put, _map(like, found))


_leaves = jtu.tree_leaves
_map = jtu.tree_map
