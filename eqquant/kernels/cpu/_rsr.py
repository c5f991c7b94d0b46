import functools as ft

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ...formats import AbstractRSR, Stored
from .._digits import outliers, provided
from .._finite import exact_where_not_finite, once
from .._problem import Problem
from .._table import register_kernel
from ._codes import codes_of, refuse_layout, to_bytes
from ._sweep import looked_up, one_by_one, swept
from ._tiles import tiled
from ._tuning import fuses


# How many groups of inputs are looked up at a time.
_unroll = 8
# How many entries a table may have, and all those together that are made at a time.
_largest = 2**12
_entries = 2**18
# How many numbers are added up one after another, at most: float32 errs by a part in
# 2**24 at each. As many such sums are then added up in turn.
_run = 2**9


def _supports(problem: Problem) -> str | None:
    if problem.rows not in (1, 2):
        rows = "an unknown number" if problem.rows is None else problem.rows
        return f"is for 1 or 2 rows, got {rows}"
    if problem.row_axis != -1:
        return "is for codes that lie with the contracted axis first"
    terms = problem.k if problem.product == "matmul" else problem.n
    if terms > _run**2:
        return f"is for sums of at most {_run**2} terms, got {terms}"
    return None


@register_kernel("matmul", AbstractRSR, supports=_supports)
def rsr_lookup(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """For each group of inputs that a code multiplies, a table of what every code there
    is would give. What the code of a row of `W` does give is looked up there."""
    format = problem.format
    assert isinstance(format, AbstractRSR)
    codes = stored["codes"]
    groups, n = codes.shape
    if fuses and codes.dtype == jnp.uint8 and x.dtype.itemsize <= 4:
        every = jnp.arange(256, dtype=jnp.uint8)[None]
        points = codes_of(every, format.levels, format.k).astype(jnp.float32)
        points = points + format.domain[0]
        x = to_bytes(x.astype(jnp.float32), format.k, groups)
        one = jnp.ones((1, n), jnp.float32)
        terms = looked_up(points)
        of_row = lambda row, codes: swept(row, codes, one, None, problem.k, *terms)
        return one_by_one(of_row, x, codes).astype(problem.dtype)
    pieces = _pieces(format, min(n, _largest))
    entries = sum(format.levels ** (stop - start) for start, stop in pieces)
    at_a_time = max(32, min(_run, _entries // (entries * problem.stack)))

    def product(x):
        padding = (0, groups * format.k - x.shape[0])
        x = jnp.pad(x.astype(_wide(x)), padding).reshape(groups, format.k)

        def some(first, number, y):
            mine = lax.dynamic_slice_in_dim(x, first, number)
            tables = [_tables(mine[:, i:j], format) for i, j in pieces]

            def few(start, number, y):
                c = lax.dynamic_slice_in_dim(codes, first + start, number)
                for piece, table in zip(pieces, tables):
                    table = lax.dynamic_slice_in_dim(table, start, number)
                    index = _part(c, format, *piece)
                    y = y + sum(_at(table[i], index[i]) for i in range(number))
                return y

            return y + _blocks(few, number, _unroll, lax.full_like(y, 0))

        y = lax.full_like(x, 0, shape=(n,))
        return _blocks(some, groups, at_a_time, y).astype(problem.dtype)

    # One after the other: with the tables of two rows at hand, both are slower.
    return jnp.stack([product(row) for row in x])


@register_kernel("matmul_transposed", AbstractRSR, supports=_supports)
def rsr_segment_sum(
    x: Float[Array, "m n"], stored: Stored, problem: Problem
) -> Float[Array, "m k"]:
    """For each group of outputs, the inputs are summed by the code that they meet, and
    those sums by digit. This is the algorithm of RSR, with the codes themselves in the
    place of an index into them."""
    format = problem.format
    assert isinstance(format, AbstractRSR)
    codes = stored["codes"]
    groups, n = codes.shape
    # Inputs take turns between several sums of the same code.
    turns = max(1, -(-n // _run))
    pieces = _pieces(format, min(n, _largest, _entries // turns))
    turn = jnp.arange(n, dtype=jnp.int32) % turns

    def product(x):
        x = x.astype(_wide(x))

        def sums(c, start, stop):
            number = format.levels ** (stop - start)
            index = _part(c, format, start, stop) + turn * number
            bins = lax.full_like(x, 0, shape=(turns * number,))
            bins = bins.at[index].add(x, mode="promise_in_bounds")
            bins = jnp.sum(bins.reshape(turns, number), axis=0)
            return _fold(bins, stop - start, format)

        def step(i, y):
            c = lax.dynamic_index_in_dim(codes, i, keepdims=False)
            new = jnp.concatenate([sums(c, *piece) for piece in pieces])
            return lax.dynamic_update_index_in_dim(y, new, i, 0)

        y = lax.full_like(x, 0, shape=(groups, format.k))
        y = lax.fori_loop(0, groups, step, y)
        return y.reshape(-1)[: problem.k].astype(problem.dtype)

    return jnp.stack([product(row) for row in x])


def _many_rows(problem: Problem) -> str | None:
    format = problem.format
    assert isinstance(format, AbstractRSR)
    if problem.rows is not None and problem.rows < 3:
        return f"is for three rows or more, got {problem.rows}"
    if format.levels**format.k > 256:
        return f"needs codes of a byte, got {format}"
    terms = problem.k if problem.product == "matmul" else problem.n
    if terms > 2**16:
        return f"is for sums of at most {2**16} terms, got {terms}"
    return refuse_layout(problem)


@exact_where_not_finite
def rsr_tiles(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Products of 8-bit integers: the digits of the codes, and the inputs in three
    digits base 256. If the inputs are integers, and too large for these, then what is
    left of them is multiplied in turn: exact, as the sums are. Rows of others, of which
    some are far larger than the rest, are computed by the reference product."""
    format = problem.format
    assert isinstance(format, AbstractRSR)
    m, k = x.shape

    def decode(codes, part):
        found = codes_of(codes, format.levels, format.k)
        return found.astype(jnp.int8) + np.int8(format.domain[0])

    def rounded(x):
        """The product with what three digits say of `x`, and the rest of `x`."""
        whole, unit = _fixed_point(x)

        def finish(y):
            first, second, third = y.reshape(3, m, y.shape[1])
            high = (first * 256 + second).astype(jnp.float32)
            return (high * 256 + third.astype(jnp.float32)) * unit

        x3 = _three_digits(whole).reshape(3 * m, k)
        y = tiled(x3, stored["codes"], decode, problem, format.k, finish)
        return y, x - whole.astype(jnp.float32) * unit

    x = x.astype(jnp.float32)
    y, rest = rounded(x)
    whole = jnp.all(rest == jnp.round(rest))
    y = once(whole & jnp.any(rest != 0), lambda y: y + rounded(rest)[0], y)
    lost = jnp.any(outliers(x), axis=1) & jnp.any(rest != 0, axis=1) & ~whole
    return jnp.where(lost[:, None], jnp.nan, y).astype(problem.dtype)


for _product in ("matmul", "matmul_transposed"):
    register_kernel(
        _product, AbstractRSR, priority=-1, supports=_many_rows, provided=provided
    )(rsr_tiles)


# The largest number of three digits, each from -128 to 127.
_largest_whole = 127 * (256**2 + 256 + 1)


def _fixed_point(
    x: Float[Array, "m k"],
) -> tuple[Integer[Array, "m k"], Float[Array, "m 1"]]:
    """Integers of three digits, and the power of two that is one of them."""
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True, initial=0)
    _, exponent = jnp.frexp(largest)
    exponent = jnp.maximum(exponent, -100) - 23
    too_large = jnp.ldexp(largest, -exponent) > _largest_whole
    exponent = jnp.where(too_large, exponent + 1, exponent)
    one = jnp.ones_like(largest)
    # (A maximum drops NaNs.)
    one = jnp.where(jnp.all(jnp.isfinite(x), axis=1, keepdims=True), one, jnp.nan)
    whole = jnp.round(x * jnp.ldexp(one, -exponent)).astype(jnp.int32)
    return whole, jnp.ldexp(one, exponent)


def _three_digits(whole: Integer[Array, "m k"]) -> Integer[Array, "3 m k"]:
    first, second, third = (whole + 0x8080) >> 16, (whole + 0x80) >> 8, whole
    return jnp.stack([first, second, third]).astype(jnp.int8)


def _wide(x):
    return x.dtype if x.dtype.itemsize > 4 else jnp.float32


def _pieces(format: AbstractRSR, limit: int) -> list[tuple[int, int]]:
    # Which digits of a code are taken at a time: all of them, or each half. The latter
    # is faster, as measured, where there are more codes than rows that have them.
    if format.levels**format.k <= limit:
        return [(0, format.k)]
    half = format.k // 2
    return [(0, half), (half, format.k)]


def _part(codes: Integer[Array, "*s"], format: AbstractRSR, start: int, stop: int):
    """Some digits of each code, as a code of their own."""
    codes = codes.astype(jnp.int32)
    if start > 0:
        codes = codes // np.int32(format.levels**start)
    if stop < format.k:
        codes = codes % np.int32(format.levels**stop)
    return codes


@ft.cache
def _digits(domain: tuple[int, ...], number: int) -> np.ndarray:
    # What each code of so many digits stands for: codes by digits.
    codes = np.arange(len(domain) ** number)[:, None]
    powers = len(domain) ** np.arange(number)[None]
    return np.array(domain, np.float32)[codes // powers % len(domain)]


def _tables(x: Float[Array, "g s"], format: AbstractRSR) -> Float[Array, "g _"]:
    """What each code of `s` digits gives: what its low digits do, and its high ones."""
    half = x.shape[1] // 2
    low = _dot(x[:, :half], _digits(format.domain, half).T)
    high = _dot(x[:, half:], _digits(format.domain, x.shape[1] - half).T)
    return (high[:, :, None] + low[:, None, :]).reshape(x.shape[0], -1)


def _fold(sums: Float[Array, " _"], s: int, format: AbstractRSR) -> Float[Array, " s"]:
    """From sums by code to sums by digit: the transpose of `_tables`."""
    low = _digits(format.domain, s // 2)
    high = _digits(format.domain, s - s // 2)
    sums = sums.reshape(len(high), len(low))
    low = _dot(jnp.sum(sums, axis=0), low)
    high = _dot(jnp.sum(sums, axis=1), high)
    return jnp.concatenate([low, high])


def _dot(x, digits):
    digits = jnp.asarray(digits, x.dtype)
    return jnp.matmul(x, digits, precision=lax.Precision.HIGHEST)


def _at(table, index):
    return table.at[index].get(mode="promise_in_bounds")


def _blocks(step, total, size, y):
    """`step(start, size, y)` for all blocks of a range, the last of which is short."""
    whole = total // size
    if whole > 0:
        y = lax.fori_loop(0, whole, lambda i, y: step(i * size, size, y), y)
    return step(whole * size, total % size, y) if total % size != 0 else y
