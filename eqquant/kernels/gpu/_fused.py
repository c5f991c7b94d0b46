import dataclasses
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
from ._seconds import rates


# Products of a few rows on any GPU, compiled by XLA alone.

# The largest number of rows. With more, sums take more instructions than decoding.
_most_rows = 8
# About how many terms one fusion adds up. (XLA's compile time grows with this number.)
_most_terms = 16
# On GPUs with more memory bandwidth, XLA writes expressions of more terms than this to
# memory, and adds them up from there.
_few_terms = 4
# At least this many threads add up terms at the same time, so that enough bytes are in
# flight on a GPU of a hundred multiprocessors. (With fewer threads, XLA decodes to
# memory first. GPUs with more multiprocessors need twice as many.)
_threads = 2**16
# A warp adds up at least this many lanes of a row.
_least = 64


def fused_sums(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes each number where it is added up, in the same fusion of XLA, in float32.
    Nothing of the size of the weight is written. It is decoded once for all rows, or
    for fewer if its numbers take long to decode."""
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    m, groups = len(x), _groups(problem)
    if groups == 1:
        return _of_group(x, stored, problem)
    rows = -(-m // groups)
    some = dataclasses.replace(problem, rows=rows)
    x = jnp.pad(x, ((0, groups * rows - m), (0, 0)))

    def of_group(x):
        # (Otherwise XLA might decode the weight before the loop.)
        x, each = lax.optimization_barrier((x, stored))
        return _of_group(x, each, some)

    y = lax.map(of_group, x.reshape(groups, rows, -1))
    return y.reshape(groups * rows, -1)[:m]


def _of_group(x, stored, problem):
    forward = problem.product == "matmul"
    # Whether the summed axis is the contiguous one in memory.
    along = (problem.row_axis == -2) == forward
    most = max(2, _together(problem) // x.shape[0]) if along else 1
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
        # (Numbers beyond the row have the scale of its last block, which may be NaN:
        # zeros in `x` are not enough.)
        return found if np.all(inside) else jnp.where(inside[None], found, 0)

    # (Across memory, XLA would write sums of more than two terms on a Hopper GPU.)
    across = some.size if some.size <= 2 else 1
    each, places = _together(problem) if sums is _along else across, range(some.size)
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
    if isinstance(problem.format, AbstractGGUFBlocks):
        each = 1  # XLA would write the products of longer terms to memory.
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


def _together(problem):
    """Returns how many products are added up before a sum over lanes."""
    codes, nbytes = unit_of(problem)
    if codes == 8 * nbytes:
        return 2  # A lane of codes of one bit has many sums already.
    if hopper() is not None and not blackwell():
        return _most_terms
    # A code in two bytes takes as many operations as two codes.
    return _few_terms // (2 if nbytes > 1 else 1)


def _converted(x):
    # The barrier makes XLA convert `x` once, and not in each thread.
    return lax.optimization_barrier(x.astype(jnp.float32))


def _along(
    terms: Sequence[Float[Array, "n u"]], axis: int, problem: Problem
) -> Float[Array, "t _"]:
    """Computes sums along the contiguous axis. A warp adds up a row, or a part of one
    if there are few rows."""
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
    """Computes sums along the other axis. Each thread adds up a part of it, so the
    threads of a warp read adjacent memory."""
    other, size = terms[0].shape[1 - axis], terms[0].shape[axis]
    # (A thread with two or more sums counts as two threads, if each byte has whole
    # codes, so that the threads of a warp read adjacent bytes.)
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
    # (Flat arrays leave XLA no choice of layout. Without the barrier, XLA would merge
    # the two sums into one.)
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
    if problem.empty:
        return "is for operands that are not empty"
    if problem.composite:
        # (This kernel reads composite formats itself, including their scales.)
        return "reads scales as they are stored"
    return refuse_lanes(problem)


def _groups(problem: Problem) -> int:
    """Returns the number of groups of rows. The weight is decoded for each of them."""
    codes, nbytes = unit_of(problem)
    terms = 2 * _most_terms
    if problem.product != "matmul" or problem.row_axis != -2:
        # Each term is a sum of its own, and all sums of parts take 2 MB (see
        # `_across`), or 4 MB on newer GPUs.
        terms = _most_terms
    if nbytes > 1:
        terms //= 2  # Codes are in two bytes, and a thread adds up half as many terms.
    if isinstance(problem.format, AbstractGGUFBlocks):
        terms = _most_terms // 2  # A term of these is several times as long.
    assert problem.rows is not None
    return -(-problem.rows // (terms // codes))


def _seconds(problem: Problem) -> float:
    # Estimated from counts of instructions: decoding a number takes about ten, and each
    # row multiplies and adds. (Threads do not load ahead, so they have fewer bytes in
    # flight than the memory could deliver.)
    assert problem.rows is not None
    groups, now = _groups(problem), rates()
    instructions = 10 * groups + 2.5 * problem.rows
    memory = groups * problem.format.bits / 8 / 0.8
    each = max(instructions / now.instructions, memory / now.bytes)
    return problem.numbers * each


register_kernel(
    ("matmul", "matmul_transposed"),
    (AbstractGrid, AbstractComposite),
    ("cuda", "rocm"),
    activation=(None, AbstractFormat),
    supports=_supports,
    seconds=_seconds,
)(fused_sums)
