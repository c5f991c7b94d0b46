import dataclasses
import functools as ft
import itertools as it
import operator
from collections.abc import Callable

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGrid,
    Stored,
)
from .._finite import exact_where_not_finite
from .._problem import Problem, rounded_inputs
from .._table import register_kernel
from ._codes import refuse_rows
from ._costs import measured
from ._units import alike, base_of, refuse_units, spans, Units, units
from ._xla import fuses


# Products of one or two rows with integers of any number of bits, packed in any way, in
# float32. Nothing of the size of the weight is written: each fusion reads a few bytes
# of all units, decodes their codes, and adds up the terms of each unit.

# The largest number of codes of a unit that are separate expressions. (The compilation
# time of XLA grows with it.)
_codes = 32
# The largest number of bytes of a unit that a fusion reads, and of rows of bytes and of
# scales. (Rows are side by side: if `n` is a power of two, a cache keeps few of them.)
_read = 8
_rows = 12
# Allocations of more than `_most` bytes are mapped anew each time, which takes longer
# than the product. Then columns are computed in pieces of `_piece` bytes.
_most = 2**25
_piece = 2**24


@exact_where_not_finite
def unit_sweep(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes the codes of a few bytes of all blocks at a time, by shifts and masks,
    and adds up their terms. Sums are in float32."""
    x = rounded_inputs(x, problem)

    if not base_of(problem).ordered:
        return _in_pieces(x, stored, problem).astype(problem.dtype)
    # One row after another: otherwise XLA would keep the scales of all codes for the
    # next row.
    rows = []
    for row in x:
        rows.append(_product(row[None], stored, problem))
        stored, rows[-1] = lax.optimization_barrier((stored, rows[-1]))
    return jnp.concatenate(rows).astype(problem.dtype)


def _in_pieces(x, stored, problem):
    number = _pieces(units(stored, problem, spans(problem, _codes)[0]), problem)
    if number == 1:
        return _product(x, stored, problem)
    size = problem.n // number
    narrow = dataclasses.replace(problem, n=size)

    def piece(i):
        cut = lambda a: lax.dynamic_slice_in_dim(a, i * size, size, axis=-1)
        each = lambda a: a if a.shape[-1] == 1 else cut(a)
        return _product(x, jtu.tree_map(each, stored), narrow)

    y = lax.map(piece, jnp.arange(number))
    return jnp.moveaxis(y, 0, 1).reshape(x.shape[0], problem.n)


def _pieces(some: Units, problem: Problem) -> int:
    """Returns the number of pieces in which columns are computed."""
    if not fuses:
        return 1  # XLA would copy each piece of the weight.
    halves = 1 if some.base.offset is None else 2
    scales = halves * sum(map(len, some.computed))
    sums = 2 * -(-len(some.codes) // _codes)  # for the last fusion, and for the next
    rows = some.number * problem.stack * (scales + sums)
    nbytes = 4 * problem.n * rows
    if nbytes <= _most:
        return 1
    # Pieces are whole lines of a cache.
    fits = (i for i in range(-(-nbytes // _piece), 65) if problem.n % (64 * i) == 0)
    return next(fits, 1)


def _product(x, stored, problem):
    every = [units(stored, problem, span) for span in spans(problem, _codes)]
    return ft.reduce(operator.add, [_sums(some.inputs(x), some) for some in every])


def _sums(x: Float[Array, "m u s"], some: Units) -> Float[Array, "m n"]:
    found = _fusions(some, _runs(some))
    scales = _scales(some)

    def terms(runs):
        """Returns the sums of some codes of each unit."""
        same = it.groupby(runs, lambda run: some.parts[run[0]])
        sums = [_of_part(x, some, list(runs), scales) for _, runs in same]
        return ft.reduce(operator.add, sums)

    if not fuses:
        # Products keep XLA from making one fusion of all.
        return ft.reduce(operator.add, [_added(terms(runs)) for runs in found])
    total = terms(found[0])
    for runs in found[1:]:
        # The barrier makes a fusion that adds to the result of the last one.
        total = lax.optimization_barrier(total) + terms(runs)
    return _added(total)


def _runs(some: Units) -> list[list[int]]:
    """Groups the codes of a unit, within its parts, so that each group is decoded as
    one expression: the same bits of bytes at even distances. All groups have one
    size."""
    size = -(-len(some.codes) // _codes)
    if size == 1:
        return [[i] for i in range(len(some.codes))]
    found = []
    for _, part in it.groupby(range(len(some.codes)), lambda i: some.parts[i]):
        part = list(part)
        for same in alike([some.codes[i] for i in part]):
            step, rest = divmod(len(same), size)
            if rest > 0:
                return [[i] for i in range(len(some.codes))]
            found += [[part[j] for j in same[i::step]] for i in range(step)]
    return found


def _fusions(some: Units, runs: list[list[int]]) -> list[list[list[int]]]:
    """Groups the runs by fusion: one fusion decodes the runs of neighbouring bytes."""
    found, read, rows = [[]], set(), set()
    for run in sorted(runs, key=lambda run: some.codes[run[0]][0].byte):
        first, *others = [field.byte for field in some.codes[run[0]]]
        ends = [] if some.base.offset is None else [(some.parts[run[0]], "offset")]
        more = {first, *others, (some.parts[run[0]], "scale"), *ends}
        if len(read | {first}) > _read or len(rows | more) > max(_rows, len(more)):
            found.append([])
            read, rows = set(), set()
        found[-1].append(run)
        read.add(first)
        rows |= more
    return found


def _scales(some: Units) -> Callable[[int], tuple[Array, Array | None]]:
    """Returns a function from a code to its scale and its offset in each unit:
    `u 1 n`."""
    found = {}
    for group in some.computed:
        # The barrier keeps these, since several fusions read them.
        every = some.scales([some.parts.index(part) for part in group])
        every = lax.optimization_barrier(every)
        for i, part in enumerate(group):
            found[part] = tuple(a if a is None else a[:, i : i + 1] for a in every)

    def scales(i):
        part = some.parts[i]
        if part not in found:
            found[part] = some.scales([i])
        return found[part]

    return scales


def _of_part(x, some, runs, scales):
    scale, offset = scales(runs[0][0])
    factor = 1.0

    def term(run):
        nonlocal factor
        point, factor = some.points(run)
        if some.base.offset == "zero_point":
            point = point - offset
        elif offset is not None:
            # (Summing the minima separately would lose digits in blocks whose numbers
            # are nearly zero.)
            point = point * scale + offset
        step = run[1] - run[0] if len(run) > 1 else 1
        part = lax.slice_in_dim(x, run[0], run[-1] + 1, step, axis=2)
        return part[..., None] * point[None]

    total = ft.reduce(operator.add, map(term, runs))
    total = total if factor == 1 else total * np.float32(factor)
    return total if some.base.offset == "minimum" else total * scale[None]


def _added(total: Float[Array, "m u r n"]) -> Float[Array, "m n"]:
    total = total.reshape(total.shape[0], -1, total.shape[-1])
    # (XLA is faster at products than at sums over columns.)
    ones = jnp.ones((1, total.shape[1]), jnp.float32)
    rows = [jnp.matmul(ones, row, precision=lax.Precision.HIGHEST) for row in total]
    return jnp.concatenate(rows)


def _supports(problem: Problem) -> str | None:
    return refuse_rows(problem) or refuse_units(problem)


register_kernel(
    "matmul",
    (AbstractGrid, AbstractGGUFBlocks),
    activation=(None, AbstractFormat),
    supports=_supports,
    seconds=measured("unit_sweep"),
)(unit_sweep)
