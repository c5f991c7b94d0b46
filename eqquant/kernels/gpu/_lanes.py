import functools as ft
import itertools as it
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
    AbstractGGUFBlocks,
    AbstractGGUFBytes,
    AbstractGrid,
    Code,
    digits,
    per_byte,
    Stored,
    stream_fields,
)
from .._problem import Problem
from ..cpu._codes import integer_step, point_table


# XLA fuses elementwise operations with the sum that uses their results, unless it
# prefers to write an intermediate array to memory. It does so with a small array, such
# as scales, of which each element is used by many others; and with an array that has
# several users, such as decoded numbers that multiply inputs of several rows. So here
# each array has one element per lane, and one user. This is so only in XLA's view:
# bytes are or-ed with zeros that XLA does not recognize as zeros. LLVM, which runs
# after XLA, does recognize them, and computes equal expressions once.


class Lanes(NamedTuple):
    """A weight split into lanes. Each lane is a few numbers of a row, and all lanes are
    packed alike.

    - `size`: the number of numbers in a lane.
    - `count`: the number of lanes in a row. The last may extend beyond the row.
    - `at`: the places of the numbers of each lane in a group of `at.size` numbers, of
      shape `[size, lanes]`. The groups of a row are consecutive.
    - `numbers`: `numbers(i, copy)` returns the numbers at place `i` of all lanes. XLA
      cannot tell that two copies are equal.
    """

    size: int
    count: int
    at: Integer[np.ndarray, "c l"]
    numbers: Callable[[int, int], Float[Array, "n u"]]

    def places(self, i: int) -> Integer[np.ndarray, " u"]:
        """Returns the places in a row of the numbers at place `i` of all lanes."""
        groups = np.arange(self.count // self.at.shape[1])
        return (groups[:, None] * self.at.size + self.at[i]).reshape(-1)

    def from_rows(self, x: Float[Array, "m k"]) -> Float[Array, "m u c"]:
        """Arranges the numbers of rows by lanes. Short last lanes are padded with
        zeros."""
        (m, k), size = x.shape, self.at.size
        groups = self.count // self.at.shape[1]
        x = jnp.pad(x, ((0, 0), (0, groups * size - k))).reshape(m, groups, size)
        order = self.at.T.reshape(-1)
        return _in_order(x, order).reshape(m, self.count, self.size)

    def to_rows(self, y: Float[Array, "m u c"], k: int) -> Float[Array, "m k"]:
        """The inverse of `from_rows`."""
        order = np.argsort(self.at.T.reshape(-1))
        y = y.reshape(y.shape[0], -1, self.at.size)
        return _in_order(y, order).reshape(y.shape[0], -1)[:, :k]


def _in_order(x, order):
    if np.array_equal(order, np.arange(order.size)):
        return x
    return jnp.take(x, order, axis=-1, mode="clip")


def lanes(stored: Stored, problem: Problem, most: int) -> Lanes:
    """Splits a weight into lanes of at most `most` numbers, or of as few as whole bytes
    allow."""
    rows = problem.layout.to_rows(stored)
    if isinstance(problem.format, AbstractGGUFBlocks):
        return _of_blocks(rows["blocks"], problem.format, problem)
    grid = grid_of(problem)
    n, j = rows["codes"].shape
    fields, nbytes = _unit(grid)
    size = _units(grid, len(fields), j // nbytes, most)
    number, nbytes = size * len(fields), size * nbytes
    bytes = rows["codes"].reshape(n, j // nbytes, nbytes)

    def numbers(i, copy):
        unit, place = divmod(i, len(fields))
        byte = lambda b: _hidden(
            bytes[:, :, unit * nbytes // size + b],
            _zeros(bytes[:, :, unit * nbytes // size + b], copy),
        )
        code = _code(byte, fields[place], grid, place)
        points = _points(grid, code, problem)
        zero = _zeros(bytes[:, :, 0], copy)
        scale, offset = _scaling(rows, problem, number, i, zero)
        return grid.numbers(points, scale, offset)

    return Lanes(number, j // nbytes, np.arange(number)[:, None], numbers)


def _of_blocks(rows, format, problem):
    """Splits blocks of GGUF files into lanes. Each lane has the numbers whose codes are
    read from one byte."""
    n, number = rows.shape[0], rows.shape[1] // format.type_size
    blocks = rows.reshape(n, number, format.type_size)
    at, grid = format.by_byte, grid_of(problem)
    part = at // grid.block_size
    # Runs of `width` adjacent lanes belong to one part. (With more than 8, XLA may
    # decide to copy the bytes of scales first.)
    width = math.gcd(8, *(np.diff(part).nonzero()[1] + 1).tolist(), at.shape[1])

    def numbers(i, copy):
        count = it.count()

        def zeros(width, first, last):
            # (Any bytes of the block will do: all their bits are shifted out.)
            bytes = blocks[:, :, first * width : last * width]
            found = _zeros(bytes, 16 * copy + next(count)).astype(jnp.uint8)
            return found.reshape(n, number, last - first, width)

        each, parts = at[i].tolist(), part[i, ::width].tolist()
        code = format.codes_of(blocks, tuple(each), ft.partial(zeros, 1))
        scale, low = format.scales_of(blocks, tuple(parts), ft.partial(zeros, width))
        points = _points(grid, code.reshape(n, -1), problem)
        low = None if low is None else low.reshape(n, -1)
        return grid.numbers(points, scale.reshape(n, -1), low)

    return Lanes(len(at), number * at.shape[1], at, numbers)


def grid_of(problem: Problem) -> AbstractGrid:
    """Returns the format of the codes."""
    format = problem.format
    format = format.base if isinstance(format, AbstractComposite) else format
    assert isinstance(format, AbstractGrid)
    return format


def refuse_lanes(problem: Problem) -> str | None:
    """Returns why a weight cannot be read as lanes, or `None` if it can."""
    format = problem.format
    if not isinstance(format, AbstractComposite):
        return None
    if isinstance(format, AbstractGGUFBlocks):
        return None
    if isinstance(format, AbstractGGUFBytes):
        return f"needs codes that each encode one number, got {format}"
    if not isinstance(format.base, AbstractGrid) or not format.splits:
        return f"needs a grid whose blocks each lie in one row, got {format}"
    block, number = format.base.block_size, len(_unit(format.base)[0])
    if block is not None and block % number != 0:
        return f"needs blocks that fill whole bytes, got {format}"
    return None


def unit_of(problem: Problem) -> tuple[int, int]:
    """Returns the number of codes in a unit, the shortest run of codes that fills whole
    bytes, and the number of these bytes."""
    if isinstance(problem.format, AbstractGGUFBlocks):
        return len(problem.format.by_byte), 1
    fields, nbytes = _unit(grid_of(problem))
    return len(fields), nbytes


@ft.cache
def _unit(grid: AbstractGrid) -> tuple[tuple[Code | None, ...], int]:
    """Returns the bit fields of the codes of a unit, and the number of its bytes. A
    code that is a digit of a byte has `None` in the place of bit fields."""
    if grid.radix is not None:
        return (None,) * per_byte(grid.radix), 1
    bits = int(grid.bits)
    number = 8 // math.gcd(bits, 8)
    return stream_fields(bits, number), number * bits // 8


def _units(grid, number, units, most):
    """Returns the number of units in a lane, chosen so that blocks and rows consist of
    whole lanes."""
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


def _points(grid, code, problem):
    # (If XLA writes the results of a lookup to memory, they should have the layout of
    # the bytes. The transposes move no data.)
    swapped = lambda a: a if problem.row_axis == -2 else a.T
    code = swapped(code)
    if integer_step(grid, most=255) is not None:
        return swapped(grid.to_points(code))
    # (A lookup takes fewer operations than other points.)
    table = jnp.asarray(_table(grid), jnp.float32)
    return swapped(table.at[code].get(mode="promise_in_bounds"))


_table = ft.cache(point_table)


def _zeros(bytes: Integer[Array, "*b"], copy: int) -> Integer[Array, "*b"]:
    # A byte shifted right by 8 bits or more is zero, but XLA does not know this. It
    # does not merge different copies either, since their shifts differ.
    # (If signed bytes were first converted to bytes without a sign, XLA might write
    # these to memory for many rows of inputs.)
    wide = bytes.astype(jnp.uint32)
    if jnp.issubdtype(bytes.dtype, jnp.signedinteger):
        wide = wide & np.uint32(255)
    return (wide >> np.uint32(8 + copy % 24)) << np.uint32(copy // 24)


def _hidden(a: Integer[Array, "..."], zero: Integer[Array, "..."]):
    return a | zero.astype(a.dtype)


def _scaling(rows, problem, number, i, zero):
    """Returns the scale and the offset of the numbers at place `i` of all lanes."""
    format, grid = problem.format, grid_of(problem)
    n, count = zero.shape
    blocks = 1 if grid.block_size is None else -(-problem.k // grid.block_size)
    of = lambda some: (format.scales(some, problem.tail), grid.offsets(some))
    if blocks == 1:
        return of(rows)
    if grid.ordered or grid.block_size % number != 0:
        # The number at this place may belong to a different block than its neighbours.
        at = np.minimum(np.arange(count) * number + i, problem.k - 1)
        block = rows["block"][0, at] if grid.ordered else at // grid.block_size
        return of(
            {name: _looked_up(rows[name], block, problem) for name in _names(grid)}
        )
    # Repeats the scales of all blocks, once for each lane of a block.
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
