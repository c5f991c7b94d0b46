import functools as ft
import operator

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8 as Int8Array, Integer

from ...formats import AbstractGrid, Int8
from .._digits import error, outliers, provided
from .._finite import exact_where_not_finite, once
from .._problem import Problem
from .._table import register_kernel
from ._codes import codes_of, grid, integer_step, per, radix, refuse_grid, scales
from ._costs import measured
from ._tiles import refuse_small, tiled


# The largest contracted size for which a sum of products of two integers up to 127 fits
# into 32 bits.
_most = (2**31 - 1) // 127**2


@exact_where_not_finite
def integer_tiles(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Multiplies 8-bit integers: the codes, and the inputs rounded to two digits each,
    of which the second counts 254ths of the first. Inputs far larger than the others of
    their row are multiplied in float32. Activations that are quantized to 8 bits are
    multiplied as they are."""
    codes, format = stored["codes"], grid(problem)
    forward = problem.product == "matmul"
    scale = scales(stored, problem)
    x = x.astype(jnp.float32)
    if not forward:
        x = x * scale
    if problem.activation is None:
        large = outliers(x)
        rest = jnp.where(large, x, 0)
        x, unit = _two_digits(jnp.where(large, 0, x))
        # Rows with outliers that are not handled apart become NaN here, and
        # `exact_where_not_finite` computes them again.
        apart = _in_few_columns(rest) | (forward & _few_in_rows(rest))
        unit = jnp.where(apart | ~jnp.any(large, axis=1, keepdims=True), unit, jnp.nan)
        parts = (1, 1 / 254)
    else:
        assert isinstance(problem.activation, Int8)
        rounded = problem.activation.encode(x)
        x, unit = rounded["codes"][None], problem.activation.scales(rounded, 0)
        rest, parts = None, (1,)
        if problem.rows == 1:
            # XLA would rewrite the product of one row as a sum, and convert the whole
            # weight to wider integers. So the row is doubled, and the results averaged.
            x, parts = jnp.concatenate([x, x]), (1 / 2, 1 / 2)
    number_of_digits, m, k = x.shape
    x = x.reshape(number_of_digits * m, k)

    def finish(y):
        y = y.reshape(number_of_digits, m, y.shape[1]).astype(jnp.float32)
        return ft.reduce(operator.add, map(operator.mul, y, parts)) * unit

    decode = lambda codes, part: _as_integers(codes, format)
    y = tiled(x, codes, decode, problem, per(format), finish)
    if rest is not None:
        there, few_columns = jnp.any(rest != 0), _in_few_columns(rest)
        of_columns = lambda y: y + _of_columns(rest, codes, problem)
        y = once(there & few_columns, of_columns, y)
        if forward:
            of_rows = lambda y: y + _of_rows(rest, codes, problem)
            y = once(there & ~few_columns & _few_in_rows(rest), of_rows, y)
    return (y * scale if forward else y).astype(problem.dtype)


def _as_integers(
    codes: Integer[Array, "j n"], format: AbstractGrid
) -> Int8Array[Array, "_ n"]:
    """Returns the points of all codes, one in each row."""
    if codes.dtype != jnp.int8:
        codes = codes_of(codes, radix(format), per(format))
    return _points(codes, format)


def _points(codes: Integer[Array, "..."], format: AbstractGrid):
    if codes.dtype == jnp.int8:
        return codes
    step = integer_step(format)
    assert step is not None
    a, b = map(np.int8, step)
    # (Overflow wraps around twice and cancels, since all points fit into 8 bits.)
    return codes.astype(jnp.int8) * a + b


def _two_digits(x: Float[Array, "m k"]):
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True, initial=0)
    unit = jnp.where(
        largest == 0, 1, jnp.maximum(largest / 127, jnp.finfo(x.dtype).tiny)
    )
    first = jnp.round(x / unit)
    second = jnp.round((x / unit - first) * 254)
    return jnp.stack([first, second]).astype(jnp.int8), unit


def _most_outliers(k: int) -> int:
    """Returns the largest number of columns with outliers, or of outliers in a row,
    that are multiplied separately."""
    return min(k, max(16, k // 64))


def _in_few_columns(x):
    return jnp.sum(jnp.any(x != 0, axis=0)) <= _most_outliers(x.shape[1])


def _few_in_rows(x):
    return jnp.all(jnp.sum(x != 0, axis=1) <= _most_outliers(x.shape[1]))


def _of_columns(
    x: Float[Array, "m k"], codes: Integer[Array, "j n"], problem: Problem
) -> Float[Array, "m _"]:
    """Multiplies inputs that are zero outside of a few columns, without scales."""
    format, size = grid(problem), _most_outliers(x.shape[1])
    p, forward = per(format), problem.product == "matmul"
    filled = jnp.any(x != 0, axis=0)
    there, found = lax.top_k(filled.astype(jnp.float32), size)
    x = jnp.where(there[None] > 0, jnp.take(x, found, axis=1, mode="clip"), 0)
    if forward:
        w = _as_integers(jnp.take(codes, found // p, axis=0, mode="clip"), format)
        w = w.reshape(size, p, w.shape[1])
        digit = (found % p)[:, None, None]
        w = jnp.take_along_axis(w, digit, axis=1, mode="clip")[:, 0]
    else:
        w = _as_integers(jnp.take(codes, found, axis=1, mode="clip"), format)
        w = w[: problem.k].T
    return jnp.matmul(x, w.astype(jnp.float32), precision=lax.Precision.HIGHEST)


# Each step reads and writes all sums, so it adds several products to each.
_per_step = 4


def _of_rows(
    x: Float[Array, "m _"], codes: Integer[Array, "j n"], problem: Problem
) -> Float[Array, "m n"]:
    """Multiplies inputs that are zero but for a few in each row, anywhere, without
    scales."""
    format, (m, k) = grid(problem), x.shape
    p, most = per(format), _most_outliers(k)
    # The places of the first inputs that are not zero.
    order = jnp.where(x != 0, jnp.arange(k, 0, -1, dtype=jnp.float32), 0)
    there, found = lax.top_k(order, most)
    numbers = jnp.where(there > 0, jnp.take_along_axis(x, found, 1, mode="clip"), 0)
    short = -most % _per_step
    numbers, found = (jnp.pad(a, [(0, 0), (0, short)]) for a in (numbers, found))
    used = jnp.max(jnp.sum(x != 0, axis=1))
    powers = np.array([radix(format) ** i for i in range(p)], np.uint8)

    def step(j, y):
        at = lambda a: lax.dynamic_slice_in_dim(a, j * _per_step, _per_step, 1)
        number, i = at(numbers), at(found)
        w = jnp.take(codes, i // p, axis=0, mode="clip")
        if p > 1:
            # One digit of each byte.
            power = jnp.asarray(powers).at[i % p].get(mode="promise_in_bounds")
            w = w // power[..., None] % np.uint8(radix(format))
        w = _points(w, format).astype(y.dtype)
        return y + jnp.sum(number[..., None] * w, axis=1)

    zeros = jnp.zeros((m, codes.shape[1]), x.dtype)
    return lax.fori_loop(0, -(-used // _per_step), step, zeros)


def _integers(problem: Problem) -> str | None:
    if problem.format.block_size is not None:
        return f"needs one scale for each channel, got {problem.format}"
    if grid(problem).offset is not None:
        return f"is for formats without zero-points, got {problem.format}"
    if reason := refuse_grid(problem):
        return reason
    if integer_step(problem.format) is None:
        return f"needs points that are integers, got {problem.format}"
    if problem.terms > _most:
        return f"is for sums of at most {_most} products, got {problem.terms}"
    activation = problem.activation
    if activation is None:
        return refuse_small(problem)
    if activation.block_size is not None:
        return f"needs activations with one scale for each row, got {activation}"
    return None


_register = ft.partial(
    register_kernel,
    format_type=AbstractGrid,
    supports=_integers,
    any_length=True,
    seconds=measured("integer_tiles"),
)
_register(("matmul", "matmul_transposed"), error=error, provided=provided)(
    integer_tiles
)
_register("matmul", activation=Int8)(integer_tiles)
