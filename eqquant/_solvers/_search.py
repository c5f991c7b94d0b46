from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float

from ..formats import Parameters
from ._least_squares import Columns, refitted
from ._rounding import Rounding


# How many numbers are computed at a time, so that they fit in the cache.
_numbers = 2**14


class Search(NamedTuple):
    """A search for the parameters of blocks with the least weighted squared error.

    - `columns`: the numbers. The numbers at one position of all blocks are contiguous.
    - `weights`: the weight of each squared error.
    """

    rounding: Rounding
    columns: Float[Array, "s n g"]
    weights: Float[Array, "s _ g"]

    def losses(self, parameters: Parameters) -> Float[Array, "c _ g"]:
        """Returns the loss of each block for each candidate, `c _ g`."""
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
        """Returns the best candidates of each block, each `number _ g`. The first is
        the best one, refined by `steps` steps that alternate between least squares for
        its codes and rounding to nearest. The unrefined candidates follow in order."""
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
    """Chooses between the arrays of two trees, block by block."""
    return _map(lambda a, b: jnp.where(where, a, b), these, others)


def in_groups(fn, xs, most: int):
    """Maps `fn` over the leading axis of arrays, in groups of at most `most` elements,
    and at least one."""
    number = len(_leaves(xs)[0])
    found = lax.map(fn, grouped(xs, most))
    return _map(lambda a: a.reshape(-1, *a.shape[2:])[:number], found)


def grouped(xs, most: int):
    """Splits the leading axis of arrays into groups of at most `most` elements, and at
    least one. The last group is padded with the last element."""
    number = len(_leaves(xs)[0])
    groups = -(-number // max(most, 1))
    size = -(-number // groups)

    def group(a):
        more = jnp.repeat(a[-1:], groups * size - number, 0)
        return jnp.concatenate([a, more]).reshape(groups, size, *a.shape[1:])

    return _map(group, xs)


def _first(found, losses, number):
    """Returns the parameters with the least losses, in order."""
    losses = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    index = jnp.arange(len(losses)).reshape(-1, 1, 1)

    # Counting gives the rank: XLA's sort is far slower for many short rows.
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
