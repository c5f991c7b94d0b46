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
from ._units import base_of, refuse_units, spans, Units, units


# Products of one or two rows with integers of any number of bits, packed in any way, in
# float32. Nothing of the size of the weight is written: each fusion reads a few bytes
# of all units, decodes their codes, and adds up the terms of each unit.

# The bytes of a unit, and those that a fusion reads. (These lie a row of `n` bytes
# apart: a cache keeps few of them if `n` is a power of two.)
_bytes = 128
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
        every = [units(stored, problem, span) for span in spans(problem, _bytes)]
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
    bytes = [code[0].byte for code in some.codes]
    _, order = np.unique(bytes, return_inverse=True)
    group = order // _read
    found = [np.flatnonzero(group == i).tolist() for i in range(group.max() + 1)]

    @ft.cache
    def scales(part):
        # The barrier keeps these, since several fusions read them.
        return lax.optimization_barrier(some.scales([some.parts.index(part)]))

    def terms(codes):
        """The sums of some codes of each unit."""
        runs = it.groupby(codes, lambda i: some.parts[i])
        if some.base.ordered:
            # (One for each code. They would be as large as the weight.)
            sums = [_of_part(x, some, list(run), some.scales([i])) for i, run in runs]
        else:
            sums = [_of_part(x, some, list(run), scales(i)) for i, run in runs]
        return ft.reduce(operator.add, sums)

    if not fuses:
        # Products keep XLA from making one fusion of all.
        return ft.reduce(operator.add, [_added(terms(codes)) for codes in found])
    total = terms(found[0])
    for codes in found[1:]:
        # The barrier makes a fusion that adds to the result of the last one.
        total = lax.optimization_barrier(total) + terms(codes)
    return _added(total)


def _of_part(x, some, codes, scales):
    scale, offset = (
        None if a is None else a.reshape(1, -1, a.shape[-1]) for a in scales
    )
    factor = 1.0

    def term(i):
        nonlocal factor
        point, factor = some.points([i])
        point = point.reshape(1, some.number, -1)
        if some.base.offset == "zero_point":
            point = point - offset
        elif offset is not None:
            # (Terms of all minima would be sums of their own, in which digits get lost
            # that most numbers of a block need if they are nearly zero.)
            point = point * scale + offset
        return x[:, :, i : i + 1] * point

    total = ft.reduce(operator.add, map(term, codes))
    total = total if factor == 1 else total * np.float32(factor)
    return total if some.base.offset == "minimum" else total * scale


def _added(total: Float[Array, "m u n"]) -> Float[Array, "m n"]:
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
