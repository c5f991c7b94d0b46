import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
import jax.tree_util as jtu
from jax.custom_batching import sequential_vmap
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
    """Computes a product in two parts. `most` multiplies the rows of the weight up to a
    multiple of eight, the tiles in which TMA copies, and `rest` the remaining rows, at
    most seven. (Padding the weight instead would copy it.) The products of a stack run
    one after another."""
    n = problem.n - problem.n % 8

    def part(fn, x, stored, rows, number):
        some = jtu.tree_map(lambda a: a if a.shape[0] == 1 else a[rows], stored)
        return fn(x, some, dataclasses.replace(problem, n=number))

    @sequential_vmap
    def one(x, stored):
        if n == problem.n:
            return most(x, stored, problem)
        first = part(most, x, stored, slice(n), n)
        others = part(rest, x, stored, slice(n, None), problem.n - n)
        return jnp.concatenate([first, others], axis=1)

    return one(x, stored)


def swizzle_of(nbytes: int, most: int) -> int:
    """Returns the width in bytes of a swizzled tile: the largest up to `most` that
    divides `nbytes`."""
    return next(size for size in (128, 64, 32) if size <= most and nbytes % size == 0)


def padded(m: int) -> int:
    """Rounds `m` up to a number of rows of `x` that TMA can copy."""
    return m if m < 8 else -(-m // 8) * 8
