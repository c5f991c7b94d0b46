import functools as ft
import operator
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float

from ...formats import (
    AbstractComposite,
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGrid,
    round_trip,
    Stored,
)
from .._problem import Problem
from .._table import register_kernel
from ._devices import blackwell, hopper
from ._lanes import Lanes, lanes, refuse_lanes, unit_of


# Products of a few rows on any GPU, compiled by XLA alone.

# The most rows. For more, adding up takes more instructions than decoding.
_most_rows = 8
# About how many expressions are added up by one fusion. (How long XLA takes to compile
# goes with that.)
_most_terms = 16
# On GPUs with more bytes a second, XLA writes what takes more than a few to memory, and
# adds it up from there.
_few_terms = 4
# How many threads add up terms at the same time, at least: as many as have enough bytes
# of memory under way on a GPU of a hundred multiprocessors. (With fewer, XLA decodes to
# memory first; and with twice as many for more multiprocessors.)
_threads = 2**16
# A warp adds up at least so many lanes of a row.
_least = 64


def fused_sums(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes each number where it is added up, in the same fusion of XLA, in float32.
    Nothing of the size of the weight is written."""
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    forward = problem.product == "matmul"
    # The axis of the sum is the one along which memory lies, or the other.
    along = (problem.row_axis == -2) == forward
    most = max(2, _together() // x.shape[0]) if along else 1
    some = lanes(stored, problem, most)
    sums = _along if along else _across
    product = _forward if forward else _transposed
    return product(x, some, problem, sums).astype(problem.dtype)


def _forward(x, some: Lanes, problem, sums):
    m, k = x.shape
    x = _converted(some.from_rows(x))

    def term(r, i):
        found = x[r, None, :, i] * some.numbers(i, r * some.size + i)
        inside = some.places(i) < k
        # (What is beyond the row has the scale of its last block, which may be NaN.)
        return found if np.all(inside) else jnp.where(inside[None], found, 0)

    each, places = _together(), range(some.size)
    terms = [
        ft.reduce(operator.add, [term(r, i) for i in places[first : first + each]])
        for first in places[::each]
        for r in range(m)
    ]
    y = sums(terms, 1, problem)
    return jnp.sum(y.reshape(-1, m, problem.n), 0)


def _transposed(x, some: Lanes, problem, sums):
    m, x = x.shape[0], _converted(x)
    each = max(1, _most_terms // m)
    found = []
    for first in range(0, some.size, each):
        places = range(first, min(first + each, some.size))
        terms = [
            x[r, :, None] * some.numbers(i, r * some.size + i)
            for i in places
            for r in range(m)
        ]
        y = sums(terms, 0, problem)
        found += [y[i * m : (i + 1) * m] for i in range(len(places))]
    return some.to_rows(jnp.stack(found, axis=-1), problem.k)


def _together():
    """How many products are added up before a sum over lanes."""
    return _few_terms if hopper() is None or blackwell() else _most_terms


def _converted(x):
    # (Once, not by each thread.)
    return lax.optimization_barrier(x.astype(jnp.float32))


def _along(
    terms: Sequence[Float[Array, "n u"]], axis: int, problem: Problem
) -> Float[Array, "t _"]:
    """The sums along an axis that lies along memory: a warp adds up a row, or a part
    of one if there are few."""
    other, size = terms[0].shape[1 - axis], terms[0].shape[axis]
    parts = min(_threads // (32 * other * problem.stack), size // _least)
    parts = next(p for p in range(max(1, parts), 0, -1) if size % p == 0)
    if parts == 1:
        return jnp.stack(_summed(terms, axis))
    shape = list(terms[0].shape)
    shape[axis : axis + 1] = parts, size // parts
    found = _summed([term.reshape(shape) for term in terms], axis + 1)
    return jnp.sum(jnp.stack(lax.optimization_barrier(found)), axis + 1)


def _summed(terms, axis):
    zeros = (np.float32(0),) * len(terms)
    return lax.reduce(tuple(terms), zeros, _added, (axis,))


def _across(
    terms: Sequence[Float[Array, "n u"]], axis: int, problem: Problem
) -> Float[Array, "t _"]:
    """The sums along the other axis: a thread adds up a part of it, and so read the
    threads of a warp what lies side by side."""
    other, size = terms[0].shape[1 - axis], terms[0].shape[axis]
    # (A thread with two sums or more has enough to do for two, if its bytes lie as
    # those of the others do.)
    few = 1 if unit_of(problem)[1] > 1 else min(2, len(terms) // (problem.rows or 1))
    each = few * max(1, other * problem.stack)
    threads = 2 * _threads if blackwell() else _threads
    parts = max(1, min(-(-threads // each), size // 8))
    length = -(-size // parts)
    window, padding = [1, 1], [(0, 0), (0, 0)]
    window[axis] = length
    padding[axis] = (0, -size % length)
    zeros = (np.float32(0),) * len(terms)
    found = lax.reduce_window(
        tuple(terms), zeros, _added, tuple(window), tuple(window), tuple(padding)
    )
    # (Flat, so that XLA has no choice of how they lie in memory. Without the barrier,
    # it would add up everything at once.)
    flat = [(a if axis == 0 else a.T).reshape(-1) for a in found]
    flat = jnp.stack(lax.optimization_barrier(flat))
    return jnp.sum(flat.reshape(len(terms), -1, other), axis=1)


def _added(a, b):
    return tuple(map(operator.add, a, b))


def _supports(problem: Problem) -> str | None:
    if problem.dtype.itemsize > 4:
        return f"computes in float32, got {problem.dtype.name}"
    if problem.rows is None or problem.rows > _most_rows:
        got = "an unknown number" if problem.rows is None else problem.rows
        return f"is for at most {_most_rows} rows, got {got}"
    if problem.n == 0 or problem.k == 0 or problem.rows == 0:
        return "is for operands that are not empty"
    if problem.composite:
        # (Of these, it reads the scales, too.)
        return "reads scales as they are stored"
    if (reason := refuse_lanes(problem)) is not None:
        return reason
    codes, _ = unit_of(problem)
    across = problem.product != "matmul"
    most = _most_terms if across and codes > 4 else 2 * _most_terms
    if isinstance(problem.format, AbstractGGUFBlocks):
        most = _most_terms // 2  # Of these, an expression is several times as long.
    if problem.rows * codes > most:
        of = problem.format
        return f"is for at most {most // codes} rows of {of}, got {problem.rows}"
    return None


def _seconds(problem: Problem) -> float:
    # By counts of instructions on an H100, which issues 2.9e13 in a second: about ten
    # decode a number, and each row multiplies and adds.
    assert problem.rows is not None
    return problem.numbers * (10 + 2.5 * problem.rows) / 2.9e13


register_kernel(
    ("matmul", "matmul_transposed"),
    (AbstractGrid, AbstractComposite),
    ("cuda", "rocm"),
    activation=(None, AbstractFormat),
    supports=_supports,
    seconds=_seconds,
)(fused_sums)
