import functools as ft
import itertools as it
import operator
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import (
    AbstractFormat,
    AbstractGrid,
    digits,
    Int4,
    Int8,
    NF4,
    round_trip,
)
from ._cpu_codes import (
    grid,
    integer_step,
    per,
    points,
    radix,
    refuse_layout,
    scales,
    to_bytes,
    zero_points,
)
from ._cpu_tuning import bfloat16_rows, fuses, rounding_size, sweep_rows
from ._problem import Problem
from ._table import register_kernel


# Products of many rows: some columns of the weight are decoded at a time, the first
# codes of all bytes and then the second, and multiplied by the inputs in that order.
# So no codes are interleaved. Across the blocks it is some bytes of all columns.
#
# There is no loop, for XLA would decode on one thread then; but before JAX 0.11 it
# would decode all of them at once otherwise.
_most_tiles = 20
_least_bytes = 2**19


def tiled(
    x: Array,
    codes: Integer[Array, "j n"],
    decode: Callable[[Integer[Array, "_ _"], Callable[[Array], Array]], list[Array]],
    problem: Problem,
    p: int,
    finish: Callable[[Array], Array] = lambda y: y,
) -> Array:
    """`x[m, k] @ w[k, n]`, or `x[m, n] @ w[k, n].T`, where each byte has `p` codes.
    `decode` gives a tile of `w`, as a list of `p`, from its bytes and from what takes
    the same part of any array `j n`. `finish` is applied to what a tile gives."""
    j, n = codes.shape
    forward = problem.product == "matmul"
    if forward:
        # The inputs of the first code of each byte, those of the second...
        x = to_bytes(x, p, j).swapaxes(1, 2)
        x = x.reshape(x.shape[0], p * j)
    # Each a 32nd of the weight in float32, if that is not very small.
    size = n * p * j * problem.stack
    number = -(-size * x.dtype.itemsize // max(_least_bytes, size // 8))
    number = min(_most_tiles, number)
    if p == 1 and x.dtype == codes.dtype:
        number = 1  # There is nothing to decode.
    length = n if forward else j

    def tile(codes, start, size):
        axis = 1 if forward else 0
        some = lambda a: lax.dynamic_slice_in_dim(a, start, size, axis)
        w = decode(codes if size == length else some(codes), some)
        y = finish(_dot(x, w[0] if p == 1 else jnp.concatenate(w), 1 - axis))
        return y if forward else y.reshape(y.shape[0], p, size)

    y = _side_by_side(tile, codes, length, -(-length // number))
    if forward:
        return y
    return y.swapaxes(1, 2).reshape(y.shape[0], p * j)[:, : problem.k]


def _side_by_side(tile, codes, length, size):
    # Tiles of one size, and what is left, one at a time in memory.
    number, rest = divmod(length, size)
    if number == 1 and rest == 0:
        return tile(codes, 0, size)
    parts = []
    if fuses:
        for i in range(number):
            parts.append(tile(codes, i * size, size))
            codes, parts[-1] = lax.optimization_barrier((codes, parts[-1]))
    else:

        def step(i, y):
            new = tile(codes, i * size, size)
            return lax.dynamic_update_slice_in_dim(y, new, i * size, axis=-1)

        shape = jax.eval_shape(ft.partial(tile, start=0, size=size), codes)
        y_shape = (*shape.shape[:-1], number * size)
        y = lax.full_like(codes, 0, shape.dtype, y_shape)
        parts.append(lax.fori_loop(0, number, step, y))
    if rest > 0:
        parts.append(tile(codes, number * size, rest))
    return jnp.concatenate(parts, axis=-1)


def _dot(x, w, axis):
    integers = jnp.issubdtype(x.dtype, jnp.integer)
    return lax.dot_general(
        x,
        w,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )


#
# Floats
#


def _float_tiles(x, stored, problem, dtype):
    codes, format = stored["codes"], grid(problem)
    j = codes.shape[0]
    forward = problem.product == "matmul"
    x = x.astype(jnp.float32)
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    scale, zero = scales(stored, problem), zero_points(stored)
    one = scale.shape[0] == 1
    if one and not forward:
        x = x * scale

    def decode(codes, part):
        def finish(i, w):
            w = w if zero is None else w - part(_by_byte(zero, i, problem, j))
            w = w if one else w * part(_by_byte(scale, i, problem, j))
            return w if dtype == jnp.float32 else _to_bfloat16(w)

        return [finish(i, w) for i, w in enumerate(points(codes, format))]

    y = tiled(x.astype(dtype), codes, decode, problem, per(format))
    return (y * scale if one and forward else y).astype(problem.dtype)


def _by_byte(a, i, problem, j):
    # From one for each block to one for the code number `i` of each byte.
    block, p = problem.format.block_size, per(grid(problem))
    if a.shape[0] == 1:
        return jnp.broadcast_to(a, (j, a.shape[1]))
    if block % p == 0:
        return jnp.repeat(a, block // p, axis=0)[:j]
    # (Not by an index, which XLA would not fuse.)
    a = jnp.pad(a, ((0, 1), (0, 0)))
    each = jnp.broadcast_to(a[:, None], (a.shape[0], block, a.shape[1]))
    return each.reshape(-1, a.shape[1])[i : p * j : p]


def _to_bfloat16(w):
    # XLA's own conversion is slower.
    bits = lax.bitcast_convert_type(w, jnp.uint32) + np.uint32(2**15)
    bits = (bits >> np.uint32(16)).astype(jnp.uint16)
    return lax.bitcast_convert_type(bits, jnp.bfloat16)


def float32_tiles(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Decodes to float32. Exact."""
    return _float_tiles(x, stored, problem, jnp.float32)


def bfloat16_tiles(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Rounds the inputs and the weight to bfloat16, and adds in float32."""
    return _float_tiles(x, stored, problem, jnp.bfloat16)


def _rounded(problem: Problem) -> str | None:
    if problem.rows is not None and problem.rows < bfloat16_rows:
        return f"is for {bfloat16_rows} rows or more, got {problem.rows}"
    return _small(problem) or refuse_layout(problem)


def _small(problem: Problem) -> str | None:
    size = problem.n * problem.k
    if size < rounding_size:
        return f"is for weights of {rounding_size} numbers or more, got {size}"
    return None


#
# Integers
#

# The largest contracted size whose sum of products, of at most 127 each, stays within
# 32 bits.
_most = (2**31 - 1) // 127**2


def integer_tiles(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Products of 8-bit integers: of the codes, and of the inputs in two digits each,
    the second one a 254th of the first. With rounded activations, one digit."""
    codes, format = stored["codes"], grid(problem)
    forward = problem.product == "matmul"
    step = integer_step(format)
    assert step is not None
    a, b = map(np.int8, step)
    scale = scales(stored, problem)
    x = x.astype(jnp.float32)
    if not forward:
        x = x * scale
    if problem.activation is None:
        x, units = _two_digits(x)
    else:
        assert isinstance(problem.activation, Int8)
        rounded = problem.activation.encode(x)
        x, units = rounded["codes"][None], problem.activation.scales(rounded, 0)[None]
        if problem.rows == 1:
            # XLA rewrites the product of one row, and widens the weight for it.
            x, units = jnp.concatenate([x, x]), jnp.concatenate([units, units]) / 2
    number, m, k = x.shape
    x = x.reshape(number * m, k)

    def decode(codes, part):
        if per(format) == 1:
            return [codes]
        found = digits(codes, radix(format))
        return [d.astype(jnp.int8) * a + b for d in found]

    def finish(y):
        y = y.reshape(number, m, y.shape[1]).astype(jnp.float32)
        return ft.reduce(operator.add, (y[i] * units[i] for i in range(number)))

    y = tiled(x, codes, decode, problem, per(format), finish)
    return (y * scale if forward else y).astype(problem.dtype)


def _two_digits(x: Float[Array, "m k"]):
    largest = jnp.max(jnp.abs(x), axis=1, keepdims=True, initial=0)
    unit = jnp.where(
        largest == 0, 1, jnp.maximum(largest / 127, jnp.finfo(x.dtype).tiny)
    )
    first = jnp.round(x / unit)
    second = jnp.round((x / unit - first) * 254)
    # (A maximum drops NaNs.)
    unit = jnp.where(jnp.all(jnp.isfinite(x), axis=1, keepdims=True), unit, jnp.nan)
    digits = jnp.stack([first, second]).astype(jnp.int8)
    return digits, jnp.stack([unit, unit / 254])


def _integers(problem: Problem) -> str | None:
    if problem.format.block_size is not None:
        return f"needs one scale for each channel, got {problem.format}"
    if integer_step(problem.format) is None:
        return f"needs points that are integers, not those of {problem.format}"
    forward = problem.product == "matmul"
    fewer = (
        sweep_rows(problem.format) if forward else 2 if per(grid(problem)) > 1 else 0
    )
    if problem.rows is not None and problem.rows <= fewer:
        return f"is for more than {fewer} rows, got {problem.rows}"
    size = problem.k if forward else problem.n
    if size > _most:
        return f"adds at most {_most} products, got {size}"
    activation = problem.activation
    if activation is None:
        return _small(problem) or refuse_layout(problem)
    if activation.block_size is not None:
        return f"needs activations with one scale for each row, got {activation}"
    return refuse_layout(problem)


for _product, _activation in it.product(
    ("matmul", "matmul_transposed"), (None, AbstractFormat)
):
    for _type in (AbstractGrid, Int4):
        register_kernel(
            _product,
            _type,
            activation=_activation,
            supports=refuse_layout,
            error=1e-5,
        )(float32_tiles)
    for _type in (NF4, Int4):
        register_kernel(
            _product,
            _type,
            activation=_activation,
            priority=1,
            supports=_rounded,
            error=4e-3,
        )(bfloat16_tiles)

_of_integers = ft.partial(
    register_kernel, format_type=AbstractGrid, priority=1, supports=_integers
)
_of_integers("matmul", error=1e-4)(integer_tiles)
_of_integers("matmul_transposed", error=1e-4)(integer_tiles)
_of_integers("matmul", activation=Int8, error=1e-5)(integer_tiles)
