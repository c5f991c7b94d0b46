import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ...formats import Stored
from .._problem import Problem


def by_eights(
    most: Callable[[Array, Stored, Problem], Array],
    rest: Callable[[Array, Stored, Problem], Array],
    x: Float[Array, "m k"],
    stored: Stored,
    problem: Problem,
) -> Float[Array, "m n"]:
    """The product with as many rows of the weight as are a multiple of eight, which is
    how memory is fetched, by `most`; and with the up to seven others by `rest`. XLA
    copies none of the former."""
    n = problem.n - problem.n % 8

    def part(fn, rows, number):
        some = jtu.tree_map(lambda a: a if a.shape[0] == 1 else a[rows], stored)
        return fn(x, some, dataclasses.replace(problem, n=number))

    if n == problem.n:
        return most(x, stored, problem)
    y = part(most, slice(n), n)
    return jnp.concatenate([y, part(rest, slice(n, None), problem.n - n)], axis=1)


def swizzle_of(nbytes: int, most: int) -> int:
    """How many bytes of a row lie together: the most that divide a row of `nbytes`."""
    return next(size for size in (128, 64, 32) if size <= most and nbytes % size == 0)


def padded(m: int) -> int:
    """A number of rows of `x` that can be fetched."""
    return m if m < 8 else -(-m // 8) * 8
