import functools as ft
import itertools as it
import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGrid,
    AbstractRSR,
    Int4,
    Int8,
    NF4,
    round_trip,
)
from .._digits import error, provided
from .._finite import exact_where_not_finite
from .._problem import Problem
from .._table import reads_byte_scales, register_kernel
from ..cpu._codes import grid, integer_step, radix, scales
from ..cpu._tiles import refuse_small
from ..cpu._tuning import (
    native_bfloat16_rows,
    native_integer_rows,
    native_narrow_columns,
    native_rounded_byte_rows,
    native_transposed_rows,
)
from . import _library as library
from ._call import by_digit, call, integer_offset, refuse, weight
from ._integer_product import integer_product


@reads_byte_scales
def native(
    x: Float[Array, "m _"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m _"]:
    """Decodes codes in registers, and multiplies and adds in float32. Codes below 4
    bits instead index tables of partial input sums (the Method of Four Russians), if
    the product is along the blocks."""
    w = weight(stored, problem)
    x = x.astype(jnp.float32)
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    if problem.product == "matmul":
        y = call("forward", [by_digit(x, w)], w, problem.n)
    elif w.per == w.used:
        y = call("transposed", [x], w, problem.k)
    else:
        number = w.operands[0].shape[0]
        y = call("transposed", [x], w, number * w.per)
        y = y.reshape(-1, number, w.per)[:, :, : w.used]
        y = y.reshape(-1, number * w.used)[:, : problem.k]
    return y.astype(problem.dtype)


@reads_byte_scales
def native_bfloat16(
    x: Float[Array, "m k"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m n"]:
    """Rounds the inputs and the decoded weight to bfloat16, multiplies by the CPU's
    bfloat16 instructions, and accumulates in float32."""
    w = weight(stored, problem)
    x = x.astype(jnp.float32)
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    y = call("bfloat16", [by_digit(x, w)], w, problem.n)
    return y.astype(problem.dtype)


@reads_byte_scales
def native_integers(
    x: Float[Array, "m k"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m n"]:
    """Multiplies 8-bit integers: the codes by the inputs, each rounded to two 8-bit
    digits. Inputs far above the others of their row are multiplied in float32, as are
    rows with many of those. Activations that are quantized to 8 bits are multiplied as
    they are.

    A unit of the second digit is a 254th of a unit of the first.
    """
    w = weight(stored, problem)
    x = x.astype(jnp.float32)
    if problem.activation is None:
        y = call("integers", [by_digit(x, w)], w, problem.n)
    else:
        assert isinstance(problem.activation, Int8)
        rounded = problem.activation.encode(x)
        # The instructions take four codes at a time; and bytes are whole.
        codes = by_digit(rounded["codes"], w)
        codes = jnp.pad(codes, ((0, 0), (0, -codes.shape[1] % math.lcm(4, w.per))))
        unit = problem.activation.scales(rounded, 0)
        y = call("rounded", [codes, unit], w, problem.n)
    return y.astype(problem.dtype)


@exact_where_not_finite
def native_bytes(
    x: Float[Array, "m k"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m n"]:
    """Multiplies 8-bit integers: the codes by the inputs, which are quantized to 8
    bits. Scales are applied to the sums."""
    assert isinstance(problem.activation, Int8)
    rounded = problem.activation.encode(x.astype(jnp.float32))
    y = integer_product(rounded["codes"], stored["codes"], across=True)
    y = y * problem.activation.scales(rounded, 0) * scales(stored, problem)
    return y.astype(problem.dtype)


def _across_blocks(problem: Problem) -> str | None:
    reason = refuse(problem)
    if reason is not None or isinstance(problem.format, AbstractRSR):
        return reason
    return refuse_many_across(problem)


def refuse_many_across(problem: Problem) -> str | None:
    """Why a product of a grid across its blocks is not for the native library: XLA is
    faster at so many rows."""
    # (Codes of 4 bits are converted to floats by XLA's tiles.)
    format = grid(problem)
    integers = radix(format) != 16 and integer_step(format) is not None
    channels = format.block_size is None
    narrow = problem.k <= native_narrow_columns and radix(format) in (16, 256)
    most = native_transposed_rows(
        narrow and library.level() >= 2, integers and channels, problem.highest
    )
    assert problem.rows is not None
    if problem.rows > most:
        return (
            f"is for at most {most} rows across the blocks of {problem.k} columns, got "
            f"{problem.rows}"
        )
    return None


def _rounds_to_bfloat16(problem: Problem) -> str | None:
    reason = refuse(problem)
    if reason is not None:
        return reason
    if library.level() < 3:
        return "needs a CPU with bfloat16 instructions (AVX512_BF16)"
    if grid(problem).offset is not None:
        return f"is for formats without zero-points, got {problem.format}"
    assert problem.rows is not None
    if problem.rows < native_bfloat16_rows:
        return f"is for {native_bfloat16_rows} rows or more, got {problem.rows}"
    return refuse_small(problem)


def _faster_in_bfloat16(problem: Problem) -> str | None:
    reason = _rounds_to_bfloat16(problem)
    # (Those of a table of points are not multiplied as integers.)
    if reason is not None or integer_offset(problem.format) is None:
        return reason
    return library.refuse_slow_bfloat16()


def refuse_integers(problem: Problem) -> str | None:
    """Why `native_integers` does not apply to a problem, or `None`."""
    reason = refuse(problem)
    if reason is not None:
        return reason
    if library.level() < 2:
        return "needs a CPU with 8-bit integer products (AVX512, VNNI)"
    if integer_offset(problem.format) is None:
        return (
            f"needs points that are consecutive integers, not those of {problem.format}"
        )
    least = native_integer_rows(problem.format, tiles=library.level() >= 4)
    if least is None:
        return "is slower than `native` for codes of one bit"
    assert problem.rows is not None
    if problem.rows < least:
        return f"is for {least} rows or more, got {problem.rows}"
    activation = problem.activation
    if activation is None:
        return refuse_small(problem)
    if activation.block_size is not None:
        return f"needs activations with one scale for each row, got {activation}"
    return None


def _refuse_bytes(problem: Problem) -> str | None:
    reason = refuse(problem)
    if reason is not None:
        return reason
    if library.level() != 1:
        return "is slower than `native_integers` on this CPU"
    assert problem.rows is not None and problem.activation is not None
    if problem.rows < native_rounded_byte_rows:
        return f"is for {native_rounded_byte_rows} rows or more, got {problem.rows}"
    for format in (problem.format, problem.activation):
        if format.block_size is not None:
            return f"needs formats with one scale for each row, got {format}"
    return None


for _type, _activation in it.product(
    (AbstractGrid, Int4, AbstractRSR), (None, Int8, AbstractFormat)
):
    _register = ft.partial(
        register_kernel,
        format_type=_type,
        activation=_activation,
        priority=10,
        error=1e-5,
    )
    _register("matmul", supports=refuse)(native)
    _register("matmul_transposed", supports=_across_blocks)(native)

# Twice: where it is not the fastest, it still runs if it is asked for.
for _type, _activation in it.product((NF4, Int4), (None, AbstractFormat)):
    _register = ft.partial(register_kernel, "matmul", _type, activation=_activation)
    _register(priority=12, error=8e-3, supports=_faster_in_bfloat16)(native_bfloat16)
    _register(priority=2.5, error=8e-3, supports=_rounds_to_bfloat16)(native_bfloat16)

for _type in (AbstractGrid, Int4):
    _register = ft.partial(
        register_kernel, "matmul", _type, priority=11, supports=refuse_integers
    )
    _register(error=error, provided=provided)(native_integers)
    _register(activation=Int8, error=1e-5)(native_integers)

register_kernel(
    *("matmul", Int8),
    activation=Int8,
    priority=11,
    error=1e-5,
    supports=_refuse_bytes,
)(native_bytes)
