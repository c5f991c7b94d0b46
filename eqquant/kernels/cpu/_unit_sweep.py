import functools as ft
import itertools as it
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGrid,
    round_trip,
    Stored,
)
from .._finite import exact_where_not_finite
from .._problem import Problem
from .._table import register_kernel
from ._tuning import fuses, unit_sweep_rows
from ._units import alike, base_of, bits_of, refuse_units, spans, Units, units


# Products of one or two rows with integers of any number of bits, packed in any way, in
# float32. Nothing of the size of the weight is written: each fusion reads a few bytes
# of all units, decodes their codes, and adds up the terms of each unit.

# How many codes of a unit are expressions of their own, at most; and the most bytes they
# take. (How long XLA takes to compile goes with that.)
_codes = 64
_bytes = 32
# The bytes of a unit that a fusion reads.
_read = 8


@exact_where_not_finite
def unit_sweep(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Decodes the codes of a few bytes of all blocks at a time, by shifts and masks,
    and adds up their terms. Sums are in float32."""
    x = x.astype(jnp.float32)
    if problem.activation is not None:
        x = round_trip(x, problem.activation)

    def product(x, stored):
        most = min(_codes, 8 * _bytes // bits_of(base_of(problem)))
        every = [units(stored, problem, span) for span in spans(problem, most)]
        return ft.reduce(operator.add, [_sums(some.inputs(x), some) for some in every])

    if not base_of(problem).ordered:
        return product(x, stored).astype(problem.dtype)
    # One row after another: XLA would keep the scale of each code for the next.
    rows = []
    for row in x:
        rows.append(product(row[None], stored))
        stored, rows[-1] = lax.optimization_barrier((stored, rows[-1]))
    return jnp.concatenate(rows).astype(problem.dtype)


def _sums(x: Float[Array, "m u s"], some: Units) -> Float[Array, "m n"]:
    runs = _runs(some)
    bytes = [some.codes[run[0]][0].byte for run in runs]
    _, order = np.unique(bytes, return_inverse=True)
    group = order // _read
    found = [[runs[i] for i in np.flatnonzero(group == j)] for j in range(max(group) + 1)]
    scales = _scales(some)

    def terms(runs):
        """The sums of some codes of each unit."""
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
    """The codes of a unit in groups of one part that are decoded as one expression: the
    same bits of bytes at even distances. All have one size."""
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


def _scales(some: Units):
    """The scales of one code of each unit, and the offsets: `u 1 n`."""
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
            # (Terms of all minima would be sums of their own, in which digits get lost
            # that most numbers of a block need if they are nearly zero.)
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
    if problem.rows is None or problem.rows > unit_sweep_rows:
        got = "an unknown number" if problem.rows is None else problem.rows
        return f"is for at most {unit_sweep_rows} rows, got {got}"
    return refuse_units(problem)


for _type, _activation in it.product(
    (AbstractGrid, AbstractGGUFBlocks), (None, AbstractFormat)
):
    register_kernel(
        "matmul",
        _type,
        activation=_activation,
        priority=3,
        supports=_supports,
        error=1e-5,
    )(unit_sweep)
