import functools as ft
import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, Integer

from ...formats import (
    AbstractComposite,
    AbstractGGUFBytes,
    AbstractGrid,
    Code,
    digits,
    per_byte,
    Stored,
    stream_fields,
)
from .._problem import Problem
from ._words import points_of


# XLA fuses what is computed element by element with the sum that it goes into, unless
# it finds that an array in between had better be written to memory: one that is small
# since each of its elements is for many others, such as scales; or one that several
# others are computed from, such as a number that inputs of several rows multiply. So
# here each array has an element for each lane, and is for one other array only. Both
# are true for XLA alone: bytes are joined with zeros that it does not know to be zeros.
# LLVM does, which comes after it, and computes once what is the same.


class Lanes(NamedTuple):
    """A weight as lanes: runs of a few numbers of its rows, all packed alike.

    - `size`: how many numbers a lane has.
    - `count`: how many lanes a row has. The last may go on beyond it.
    - `numbers`: `numbers(i, copy)` are the numbers at the place `i` of all lanes. XLA
      does not know that two copies are the same.
    """

    size: int
    count: int
    numbers: Callable[[int, int], Float[Array, "n u"]]


def lanes(stored: Stored, problem: Problem, most: int) -> Lanes:
    """A weight as lanes of at most so many numbers, or as few as whole bytes allow."""
    rows, grid = problem.layout.to_rows(stored), grid_of(problem)
    n, j = rows["codes"].shape
    fields, nbytes = _unit(grid)
    size = _units(grid, len(fields), j // nbytes, most)
    number, nbytes = size * len(fields), size * nbytes
    bytes = rows["codes"].reshape(n, j // nbytes, nbytes)
    swapped = lambda a: a if problem.row_axis == -2 else a.T

    def numbers(i, copy):
        unit, place = divmod(i, len(fields))
        byte = lambda b: _hidden(
            bytes[:, :, unit * nbytes // size + b],
            _zeros(bytes[:, :, unit * nbytes // size + b], copy),
        )
        code = _code(byte, fields[place], grid, place)
        # (Where a lookup writes its results in rows, it should write them as the bytes
        # lie in memory. Nothing is moved.)
        points = swapped(_points(grid, swapped(code)))
        zero = _zeros(bytes[:, :, 0], copy)
        scale, offset = _scaling(rows, problem, number, i, zero)
        return grid.numbers(points, scale, offset)

    return Lanes(number, j // nbytes, numbers)


def grid_of(problem: Problem) -> AbstractGrid:
    """The format of the codes."""
    format = problem.format
    format = format.base if isinstance(format, AbstractComposite) else format
    assert isinstance(format, AbstractGrid)
    return format


def refuse_lanes(problem: Problem) -> str | None:
    """Why a weight is not read as lanes, if so."""
    format = problem.format
    if not isinstance(format, AbstractComposite):
        return None
    if isinstance(format, AbstractGGUFBytes):
        return f"needs codes and scales in arrays of their own, got {format}"
    if not isinstance(format.base, AbstractGrid) or not format.splits:
        return f"needs codes of a grid with blocks in one row each, got {format}"
    block, number = format.base.block_size, len(_unit(format.base)[0])
    if block is not None and block % number != 0:
        return f"needs blocks of whole bytes, got {format}"
    return None


def unit_of(problem: Problem) -> tuple[int, int]:
    """How many codes end together with a byte, and the number of their bytes."""
    fields, nbytes = _unit(grid_of(problem))
    return len(fields), nbytes


@ft.cache
def _unit(grid: AbstractGrid) -> tuple[tuple[Code | None, ...], int]:
    """The codes that end together with a byte, and the number of their bytes. `None`
    for each that is a digit."""
    if grid.radix is not None:
        return (None,) * per_byte(grid.radix), 1
    bits = int(grid.bits)
    number = 8 // math.gcd(bits, 8)
    return stream_fields(bits, number), number * bits // 8


def _units(grid, number, units, most):
    """How many units a lane has, such that blocks and rows are whole lanes."""
    block = grid.block_size or number * units
    for size in (8, 4, 2):
        whole = units % size == 0 and block % (number * size) == 0
        if number * size <= most and whole and not grid.ordered:
            return size
    return 1


def _code(byte, fields, grid, place):
    if fields is None:
        return digits(byte(0), grid.radix)[place]

    def bits(field):
        found = byte(field.byte) >> np.uint8(field.start)
        return (found & np.uint8(2**field.number - 1)) << np.uint8(field.at)

    return ft.reduce(operator.or_, map(bits, fields))


def _points(grid, code):
    found = points_of(grid)
    if found is None or found.table is None:
        return grid.to_points(code)
    table = jnp.asarray(found.table, jnp.float32)
    return table.at[code].get(mode="promise_in_bounds")


def _zeros(bytes: Integer[Array, "n u"], copy: int) -> Integer[Array, "n u"]:
    # A byte has no bits from the eighth on.
    wide = bytes.astype(jnp.uint8).astype(jnp.uint32)
    return (wide >> np.uint32(8 + copy % 24)) << np.uint32(copy // 24)


def _hidden(a: Integer[Array, "..."], zero: Integer[Array, "..."]):
    return a | zero.astype(a.dtype)


def _scaling(rows, problem, number, i, zero):
    """The scale and the offset of the numbers at the place `i` of all lanes."""
    format, grid = problem.format, grid_of(problem)
    n, count = zero.shape
    blocks = 1 if grid.block_size is None else -(-problem.k // grid.block_size)
    of = lambda some: (format.scales(some, problem.tail), grid.offsets(some))
    if blocks == 1:
        return of(rows)
    if grid.ordered or grid.block_size % number != 0:
        # The number at this place may be of another block than its neighbours.
        at = np.minimum(np.arange(count) * number + i, problem.k - 1)
        block = rows["block"][0, at] if grid.ordered else at // grid.block_size
        return of(
            {name: _looked_up(rows[name], block, problem) for name in _names(grid)}
        )
    # The same scales in a row of each lane of a block.
    each = grid.block_size // number
    zero = jnp.pad(zero, ((0, 0), (0, blocks * each - count)))
    zero = zero.reshape(n, blocks, each).swapaxes(1, 2)

    def in_each(path, a):
        one_for_each = a.shape[-1] == blocks and path[0].key != "codes"
        return _hidden(a[:, None], zero) if one_for_each else a[:, None]

    def in_lanes(a):
        return a.swapaxes(1, 2).reshape(a.shape[0], blocks * each)[:, :count]

    scale, offset = of(jtu.tree_map_with_path(in_each, rows))
    return in_lanes(scale), None if offset is None else in_lanes(offset)


def _names(grid):
    return ("scale",) if grid.offset is None else ("scale", grid.offset)


def _looked_up(a, index, problem):
    if problem.row_axis == -2:
        return jnp.take(a, index, axis=1, mode="clip")
    return jnp.take(a.T, index, axis=0, mode="clip").T
