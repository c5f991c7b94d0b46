import functools as ft
from collections.abc import Callable
from typing import Any

import jax.tree_util as jtu
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Float

from ...formats import Stored
from .._by_rows import by_rows
from .._problem import Problem


# A part of a weight has at most this many numbers, and consists of whole tiles of the
# kernels, of 128 rows. A copy of its codes takes at most 12 MB, a byte for each number.
# (A GPU that copies 3 TB/s swaps the axes of a part of 4-bit numbers in 4 us, about as
# long as it takes to launch a program.)
_most_numbers, _tile = 12 * 2**20, 128


def in_parts(fn: Callable[..., Array]) -> Callable[..., Array]:
    """Makes a kernel that first copies the stored arrays, in another order or packing,
    multiply with some rows of the weight at a time. So the copies take at most 32 MB,
    even if it copies the arrays twice."""

    @ft.wraps(fn)
    def of_parts(
        x: Float[Array, "m _"], stored: Stored, problem: Problem, **kwargs: Any
    ) -> Float[Array, "m _"]:
        if problem.numbers <= _most_numbers:
            return fn(x, stored, problem, **kwargs)

        def of_part(x, stored, problem):
            return fn(x, jtu.tree_map(_as_it_lies, stored), problem, **kwargs)

        return by_rows(of_part, x, stored, problem, _rows(problem))

    return of_parts


def _rows(problem):
    width = problem.k * problem.stack
    most = max(1, _most_numbers // (width * _tile)) * _tile
    # (If parts do not fill the rows, another program is compiled for the rest.)
    sizes = (size for size in range(most, most // 2, -_tile) if problem.n % size == 0)
    return next(sizes, most)


def _as_it_lies(a):
    # (Otherwise XLA would swap the axes of the whole weight before the loop.)
    return with_layout_constraint(a, Layout(tuple(range(a.ndim))))
