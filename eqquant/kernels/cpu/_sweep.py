import functools as ft
import math
import operator
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ...formats import AbstractFormat, AbstractGrid, digits
from .._finite import exact_where_not_finite
from .._problem import Problem, rounded_inputs
from .._table import register_kernel
from ._codes import (
    codes_of,
    grid,
    integer_step,
    per,
    radix,
    refuse_grid,
    refuse_rows,
    scales,
    to_bytes,
)
from ._costs import measured
from ._xla import fuses


# Products of one or two rows with a weight, in float32. They sweep over the codes: each
# step reads some bytes of every row of the weight, and adds their terms to sums of the
# size of the result. Nothing of the size of the weight is written.
#
# XLA runs a loop on one thread, but a large fusion on all of them. So the product is a
# few fusions, one after another; before JAX 0.11, it is a loop.

# The number of sums that a fusion keeps side by side: 2 MB, which fit into a cache.
_partial = 2**19
_unroll = 8
# The largest number of terms that are added up one after another, to bound the error.
_longest = 2**8

# `term(t, c, z)` returns the terms that bytes `c` add to a product, from the prepared
# inputs `t` that they multiply, and their zero-points `z` if there are any.
_Term = Callable[
    [Float[Array, "s t"], Integer[Array, "s n"], Float[Array, "s n"] | None],
    Float[Array, "s n"],
]


def swept(
    x: Float[Array, "j p"],
    codes: Integer[Array, "j n"],
    scale: Float[Array, "g n"],
    zero: Float[Array, "g n"] | None,
    block: int,
    prepare: Callable[[Float[Array, "s p"]], Float[Array, "s t"]],
    term: _Term,
) -> Float[Array, " n"]:
    """Returns the sum of `term(prepare(x[i]), codes[i]) * scale[p * i // block]` over
    all bytes `i`. A byte that has codes of two blocks gets the scale of the first."""
    j, n = codes.shape
    p = x.shape[1]
    one = scale.shape[0] == 1
    whole = one or block % p == 0  # Otherwise, a byte may have codes of two blocks.
    unroll = _unroll if one or not whole else math.gcd(_unroll, block // p)
    # Bytes are taken in groups of `unroll`, and groups in parts: each part is a fusion
    # that adds up the bytes of each group, for all of its groups side by side.
    groups, rest = divmod(j, unroll)
    parts = max(1, -(-groups * n // _partial), -(-groups // _longest))
    each = 1 if one or not whole else block // p // unroll  # groups in a block

    def of_blocks(a, start, number):
        # For each of these groups, the row of `a` of its block.
        if one:
            return a
        if number == 1:
            return lax.dynamic_slice_in_dim(a, start // each, 1)
        a = a[start // each : -(-(start + number) // each), None]
        a = jnp.broadcast_to(a, (a.shape[0], each, n))
        return a.reshape(-1, n)[:number]

    def of_bytes(a, first, number, size):
        # The rows for the byte `first`, and every `size`-th byte after it.
        start = p * first // block
        if number == 1:
            return lax.dynamic_slice_in_dim(a, start, 1)
        a = a[start : p * (first + (number - 1) * size) // block + 1, None]
        a = jnp.broadcast_to(a, (a.shape[0], block, n)).reshape(-1, n)
        return a[p * first - block * start :: p * size][:number]

    def sums(start, number, size=unroll):
        # The sums over some groups of `size` bytes each, from the group `start` on.
        first = start * unroll
        t = prepare(lax.dynamic_slice_in_dim(x, first, number * size))
        z = None if zero is None else of_blocks(zero, start, number)

        def at(i):
            if number == 1:
                c = lax.dynamic_slice_in_dim(codes, first + i, 1)
            else:
                last = first + i + (number - 1) * size
                c = lax.slice_in_dim(codes, first + i, last + 1, size)
            found = term(t[i::size], c, z)
            return found if whole else found * of_bytes(scale, first + i, number, size)

        total = ft.reduce(operator.add, map(at, range(size)))
        return total if one or not whole else total * of_blocks(scale, start, number)

    y = lax.full_like(x, 0, shape=(n,))
    if fuses:
        # Parts begin with a block. The rest is a smaller part of its own.
        size = groups // parts // each * each
        left = groups - parts * size
        if size > 0:
            y = y + _added([ft.partial(sums, i * size, size) for i in range(parts)])
        if left > 0:
            y = y + _added([ft.partial(sums, parts * size, left)])
    elif groups > 0:
        y = lax.fori_loop(0, groups, lambda i, y: y + sums(i, 1)[0], y)
    if rest > 0:
        y = y + sums(groups, 1, rest)[0]
    # A scale of a whole channel is applied after the sum.
    return y * scale[0] if one else y


def _begun(x: Float[Array, "j p"], block: int) -> Float[Array, "j p"]:
    """Keeps the inputs that belong to the block in which their byte begins. The others
    become zero."""
    j, p = x.shape
    of_input = np.arange(j * p).reshape(j, p) // block
    return jnp.where(of_input == of_input[:, :1], x, 0)


def _ended(
    x: Float[Array, "j p"],
    codes: Integer[Array, "j n"],
    scale: Float[Array, "g n"],
    block: int,
    prepare: Callable[[Float[Array, "s p"]], Float[Array, "s t"]],
    term: _Term,
) -> Float[Array, " n"]:
    """Returns the part of a product that `_begun` leaves out: the inputs of the second
    block, for each byte that has codes of two blocks."""
    p = x.shape[1]
    blocks = np.arange(1, scale.shape[0])
    blocks = blocks[blocks * block % p != 0]
    bytes = blocks * block // p
    ended = bytes[:, None] * p + np.arange(p) >= blocks[:, None] * block
    rows = lambda a, index: jnp.take(a, jnp.asarray(index), axis=0, mode="clip")
    t = prepare(jnp.where(ended, rows(x, bytes), 0))
    return _added([lambda: term(t, rows(codes, bytes), None) * rows(scale, blocks)])


def one_by_one(
    product: Callable[[Float[Array, "j p"], Integer[Array, "j n"]], Float[Array, " n"]],
    x: Float[Array, "m j p"],
    codes: Integer[Array, "j n"],
) -> Float[Array, "m n"]:
    """Multiplies one row after another. (In a single fusion, XLA would share the codes
    between rows after converting them to 32 bits.)"""
    found = []
    for row in x:
        found.append(product(row, codes))
        codes, found[-1] = lax.optimization_barrier((codes, found[-1]))
    return jnp.stack(found)


def _added(parts: Sequence[Callable[[], Float[Array, "s n"]]]) -> Float[Array, " n"]:
    first, *others = parts
    total = first()
    for part in others:
        # The barrier makes each part a fusion that adds to the result of the last one.
        total = lax.optimization_barrier(total) + part()
    # (XLA is faster at products than at sums over columns.)
    ones = jnp.ones((1, total.shape[0]), jnp.float32)
    return jnp.matmul(ones, total, precision=lax.Precision.HIGHEST)[0]


def looked_up(points: Float[Array, "p 256"]) -> tuple[Callable, _Term]:
    """Returns `prepare` and `term` for `swept`: `prepare` makes a table of the terms of
    all 256 bytes, and `term` looks bytes up in it. `points` holds the points of the `p`
    codes of each byte."""

    def table(x):
        sums = jnp.matmul(x, points, precision=lax.Precision.HIGHEST)
        # Without a barrier, XLA would compute each entry again at every lookup.
        return lax.optimization_barrier(sums)

    def term(table, codes, zero):
        index = codes.astype(jnp.int32)
        return jnp.take_along_axis(table, index, axis=1, mode="promise_in_bounds")

    return table, term


def _terms(format):
    def by_digit(x, codes, zero):
        points = [format.to_points(code) for code in digits(codes, radix(format))]
        points = points if zero is None else [point - zero for point in points]
        parts = [x[:, i : i + 1] * point for i, point in enumerate(points)]
        return ft.reduce(operator.add, parts)

    def nibbles(x, codes, zero):
        # With the upper bit of each half flipped, they are signed integers.
        both = lax.bitcast_convert_type(codes ^ np.uint8(0x88), jnp.int8)
        both = both.astype(jnp.int32)
        low, high = (both << 28) >> 28, both >> 4
        return x[:, :1] * low.astype(jnp.float32) + x[:, 1:] * high.astype(jnp.float32)

    # (A table holds sums of points, without zero-points.)
    if per(format) == 1 or format.offset == "zero_point":
        return lambda x: x, by_digit
    if fuses and radix(format) == 16 and integer_step(format) == (1, -8):
        return lambda x: x, nibbles
    every = jnp.arange(256, dtype=jnp.uint8)[None]
    return looked_up(format.to_points(codes_of(every, radix(format), per(format))))


@exact_where_not_finite
def sweep(
    x: Float[Array, "m k"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m n"]:
    """Decodes one or two codes per byte, or looks bytes up in a table of the 256
    partial sums of the inputs that they multiply (the Method of Four Russians). Sums
    are in float32."""
    codes, p = stored["codes"], per(grid(problem))
    block = problem.format.block_size or problem.k
    zero, scale = grid(problem).offsets(stored), scales(stored, problem)
    terms = _terms(grid(problem))
    x = to_bytes(rounded_inputs(x, problem), p, codes.shape[0])

    def product(row, codes):
        if scale.shape[0] == 1 or block % p == 0:
            return swept(row, codes, scale, zero, block, *terms)
        y = swept(_begun(row, block), codes, scale, zero, block, *terms)
        return y + _ended(row, codes, scale, block, *terms)

    return one_by_one(product, x, codes).astype(problem.dtype)


def _supports(problem: Problem) -> str | None:
    refused = refuse_rows(problem) or refuse_grid(problem)
    return refused or _refuse_zero_points(problem)


def _refuse_zero_points(problem):
    format = grid(problem)
    ends = format.block_size is None or format.block_size % per(format) == 0
    if format.offset == "zero_point" and not ends:
        return f"needs blocks that end with a byte for zero-points, got {format}"
    return None


register_kernel(
    "matmul",
    AbstractGrid,
    activation=(None, AbstractFormat),
    supports=_supports,
    seconds=measured("sweep"),
)(sweep)
