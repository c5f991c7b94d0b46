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
from ._costs import measured
from ._sweep import looked_up, one_by_one, swept
from ._tiles import tiled
from ._xla import fuses


# The number of groups of inputs that are looked up in one step of a loop.
_unroll = 8
# The largest number of entries of one table, and of all tables in memory at a time.
_largest = 2**12
_entries = 2**18
# The largest number of terms that are added up one after another, since each addition
# in float32 may be off by a part in 2**24. Up to the same number of such sums are then
# added up.
_run = 2**9


def _supports(problem: Problem) -> str | None:
    if problem.rows not in (1, 2):
        rows = "an unknown number" if problem.rows is None else problem.rows
        return f"is for 1 or 2 rows, got {rows}"
    if problem.empty:
        return "needs non-empty operands"
    if problem.row_axis != -1:
        return "needs the contracted axis first in memory, where `tree_prepack` puts it"
    terms = problem.k if problem.product == "matmul" else problem.n
    if terms > _run**2:
        return f"is for sums of at most {_run**2} terms, got {terms}"
    return None


@register_kernel(
    "matmul", AbstractRSR, supports=_supports, seconds=measured("rsr_lookup")
)
def rsr_lookup(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """For each group of inputs that one code multiplies, computes a table of the
    partial sums of all possible codes, and looks up the entry of each row of `W`."""
    format = problem.format
    assert isinstance(format, AbstractRSR)
    codes = stored["codes"]
    groups, n = codes.shape
    if fuses and codes.dtype == jnp.uint8 and x.dtype.itemsize <= 4:
        # A one-byte code is looked up like a byte of any other format.
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

    # One row after the other: both are slower if the tables of two rows exist at once.
    return jnp.stack([product(row) for row in x])


@register_kernel(
    "matmul_transposed",
    AbstractRSR,
    supports=_supports,
    seconds=measured("rsr_segment_sum"),
)
def rsr_segment_sum(
    x: Float[Array, "m n"], stored: Stored, problem: Problem
) -> Float[Array, "m k"]:
    """For each group of outputs, sums the inputs by the code that multiplies them, and
    then these sums by digit. This is the algorithm of RSR; the codes themselves take
    the place of its index of segments."""
    format = problem.format
    assert isinstance(format, AbstractRSR)
    codes = stored["codes"]
    groups, n = codes.shape
    # The inputs of one code take turns between several sums, so that none is too long.
    turns = max(1, -(-n // _run))
    pieces = _pieces(format, min(n, _largest, _entries // turns))
    turn = jnp.arange(n, dtype=jnp.int32) % turns

    def product(x):
        x = x.astype(_wide(x))

        def sums(c, start, stop):
            number = format.levels ** (stop - start)
            # One bin for each pair of a turn and a code.
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
    """Multiplies 8-bit integers: the points of the codes, and the inputs rounded to
    three digits base 256. Integers too large for three digits have their remainders
    multiplied as well. Other rows in which some inputs are far larger than the rest are
    left to the reference product."""
    format = problem.format
    assert isinstance(format, AbstractRSR)
    m, k = x.shape

    def decode(codes, part):
        found = codes_of(codes, format.levels, format.k)
        return found.astype(jnp.int8) + np.int8(format.domain[0])

    def rounded(x):
        """Returns the product of `x` rounded to three digits, and the remainder of
        `x`."""
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
    # Remainders of integers are multiplied in a second pass. Other remainders are about
    # as small as roundings of float32, unless the row has outliers: such rows become
    # NaN, which `exact_where_not_finite` replaces.
    whole = jnp.all(rest == jnp.round(rest))
    y = once(whole & jnp.any(rest != 0), lambda y: y + rounded(rest)[0], y)
    lost = jnp.any(outliers(x), axis=1) & jnp.any(rest != 0, axis=1) & ~whole
    return jnp.where(lost[:, None], jnp.nan, y).astype(problem.dtype)


register_kernel(
    ("matmul", "matmul_transposed"),
    AbstractRSR,
    supports=_many_rows,
    provided=provided,
    seconds=measured("rsr_tiles"),
)(rsr_tiles)


# The largest number with three digits base 256, each from -128 to 127.
_largest_whole = 127 * (256**2 + 256 + 1)


def _fixed_point(
    x: Float[Array, "m k"],
) -> tuple[Integer[Array, "m k"], Float[Array, "m 1"]]:
    """Returns the inputs as integers of at most three digits, in units of a power of
    two for each row."""
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True, initial=0)
    _, exponent = jnp.frexp(largest)
    # 23 bits and a sign; or 22, if the largest would not fit into three signed digits.
    exponent = jnp.maximum(exponent, -100) - 23
    too_large = jnp.ldexp(largest, -exponent) > _largest_whole
    exponent = jnp.where(too_large, exponent + 1, exponent)
    one = jnp.ones_like(largest)
    # (On a CPU, XLA's maximum may drop NaNs.)
    one = jnp.where(jnp.all(jnp.isfinite(x), axis=1, keepdims=True), one, jnp.nan)
    whole = jnp.round(x * jnp.ldexp(one, -exponent)).astype(jnp.int32)
    return whole, jnp.ldexp(one, exponent)


def _three_digits(whole: Integer[Array, "m k"]) -> Integer[Array, "3 m k"]:
    # Digits are signed, so each rounds to nearest: half of the digits below is added
    # before they are shifted out. Casting to 8 bits keeps the lowest digit.
    first, second, third = (whole + 0x8080) >> 16, (whole + 0x80) >> 8, whole
    return jnp.stack([first, second, third]).astype(jnp.int8)


def _wide(x):
    return x.dtype if x.dtype.itemsize > 4 else jnp.float32


def _pieces(format: AbstractRSR, limit: int) -> list[tuple[int, int]]:
    # The ranges of digits of a code that get a table each: all digits, or two halves.
    # Halves were faster in measurements if there are more possible codes than rows.
    if format.levels**format.k <= limit:
        return [(0, format.k)]
    half = format.k // 2
    return [(0, half), (half, format.k)]


def _part(codes: Integer[Array, "*s"], format: AbstractRSR, start: int, stop: int):
    """Returns some digits of each code, as a code of their own."""
    codes = codes.astype(jnp.int32)
    if start > 0:
        codes = codes // np.int32(format.levels**start)
    if stop < format.k:
        codes = codes % np.int32(format.levels**stop)
    return codes


@ft.cache
def _digits(domain: tuple[int, ...], number: int) -> np.ndarray:
    # The points of the digits of each code of this length.
    codes = np.arange(len(domain) ** number)[:, None]
    powers = len(domain) ** np.arange(number)[None]
    return np.array(domain, np.float32)[codes // powers % len(domain)]


def _tables(x: Float[Array, "g s"], format: AbstractRSR) -> Float[Array, "g _"]:
    """Returns the partial sums of all codes of `s` digits: the sums for the low digits
    plus the sums for the high digits."""
    half = x.shape[1] // 2
    low = _dot(x[:, :half], _digits(format.domain, half).T)
    high = _dot(x[:, half:], _digits(format.domain, x.shape[1] - half).T)
    return (high[:, :, None] + low[:, None, :]).reshape(x.shape[0], -1)


def _fold(sums: Float[Array, " _"], s: int, format: AbstractRSR) -> Float[Array, " s"]:
    """Converts sums by code to sums by digit: the transpose of `_tables`."""
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
    """Applies `y = step(start, size, y)` to all blocks of a range. The last block may
    be short."""
    whole = total // size
    if whole > 0:
        y = lax.fori_loop(0, whole, lambda i, y: step(i * size, size, y), y)
    return step(whole * size, total % size, y) if total % size != 0 else y
