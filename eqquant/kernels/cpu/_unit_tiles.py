import itertools as it

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGrid,
    FP4,
    FP8,
    Int,
    Stored,
)
from .._finite import exact_where_not_finite
from .._problem import Problem, rounded_inputs
from .._table import register_kernel
from ._costs import measured
from ._tiles import after, dot
from ._units import refuse_units, spans, Units, units


# Products of many rows with integers of any number of bits, packed in any way. A tile
# consists of the codes of some units that are the same bits of bytes at even distances,
# so that all are decoded alike.

# A tile takes a 20th of the weight in float32, but at least two megabytes.
_most_tiles = 20
_least_numbers = 2**19


def unit_tiles(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes tiles of the weight to float32, by shifts and masks, and multiplies in
    float32."""
    kernel = _unit_tiles
    if problem.product == "matmul" and problem.tail > 0:
        # An infinite scale of codes beyond the last multiplies zeros.
        kernel = exact_where_not_finite(kernel)
    return kernel(x, stored, problem)


def _unit_tiles(x, stored, problem):
    x = rounded_inputs(x, problem)
    forward = problem.product == "matmul"
    parts, positions, later = [], [], stored
    for span in spans(problem, 0, _number(stored, problem)):
        for run in _runs(units(stored, problem, span)):
            some = units(later, problem, span)
            w = _decoded(some, run)
            if forward:
                part = some.inputs(x)[:, :, np.array(run)].reshape(x.shape[0], -1)
                part = dot(part, w, 0)
                part = parts.pop() + part if parts else part
            else:
                part = dot(x, w, 1)
                at = np.arange(some.number)[:, None] * len(some.codes) + np.array(run)
                positions.append(some.first + at.reshape(-1))
            # One after another, so that only one tile is in memory at a time.
            later, part = after(stored, part)
            parts.append(part)
    y = jnp.concatenate(parts, axis=1)
    if not forward:
        order = np.argsort(np.concatenate(positions))[: problem.k]
        y = jnp.take(y, order, axis=1, mode="clip")
    return y.astype(problem.dtype)


def _number(stored, problem):
    """Returns the largest number of units in a tile."""
    some = units(stored, problem, spans(problem, 0)[0])
    numbers = problem.n * problem.k * problem.stack // _most_tiles
    of_unit = len(some.codes) // len(_runs(some)) * problem.n * problem.stack
    return max(1, max(_least_numbers, numbers) // max(1, of_unit))


def _runs(some: Units) -> list[list[int]]:
    """Groups the codes of a unit, within its parts, by the same bits of bytes at even
    distances."""

    def kind(i):
        part = 0 if some.base.ordered else some.parts[i]
        return part, *(field[1:] for field in some.codes[i])

    found = []
    order = sorted(range(len(some.codes)), key=kind)
    for _, same in it.groupby(order, kind):
        run = []
        for i in same:
            if len(run) > 1 and _step(some, run[-1], i) != _step(some, *run[:2]):
                found.append(run)
                run = []
            run.append(i)
        found.append(run)
    return found


def _step(some, i, j):
    bytes = [b.byte - a.byte for a, b in zip(some.codes[i], some.codes[j])]
    return j - i, bytes


def _decoded(some: Units, run: list[int]) -> Float[Array, "_ n"]:
    point, factor = some.points(run)
    scale, offset = some.scales(run)
    if not some.base.ordered:
        # The barrier keeps these, since many codes share them.
        scale, offset = lax.optimization_barrier((scale, offset))
    scale = scale if factor == 1 else scale * np.float32(factor)
    w = some.base.numbers(point, scale, offset)
    return w.reshape(-1, w.shape[-1])


def _supports(problem: Problem) -> str | None:
    reason = refuse_units(problem)
    if reason is not None or not problem.composite:
        return reason
    # (XLA would write scales that are looked up or multiplied anew for each tile.)
    size = problem.format.block_size or problem.k
    if size < 64 and not isinstance(problem.format, Int | FP4 | FP8):
        return f"would copy composite scales of blocks of {size} again and again"
    return None


register_kernel(
    ("matmul", "matmul_transposed"),
    (AbstractGrid, AbstractGGUFBlocks),
    activation=(None, AbstractFormat),
    supports=_supports,
    seconds=measured("unit_tiles"),
)(unit_tiles)
