import functools as ft
import itertools as it

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...formats import (
    AbstractCodebook,
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGrid,
    Int4,
    Int8,
    NF4,
    Q6_K,
    round_trip,
    Stored,
)
from .._digits import error, provided
from .._problem import Problem
from .._table import reads_byte_scales, reads_panels, register_kernel
from ..cpu._codes import grid, integer_step, radix, refuse_grid
from ..cpu._tiles import refuse_small
from ..cpu._tuning import (
    native_decoded_bfloat16_rows,
    native_decoded_integer_rows,
    native_decodes_first,
    native_integer_block,
    native_split_block,
    native_split_rows,
    native_tile_block,
    native_tile_rows,
)
from . import _library as library
from ._blocks import (
    blocks,
    call,
    has_fours,
    integer_points,
    refuse,
    with_integer_points,
)
from ._call import refuse as refuse_digits
from ._kernels import refuse_integers, refuse_many_across


# Kernels for all formats of blocks: codes of 1 to 8 bits, which are integers or points
# of a table, with any offset, or packed as in GGUF's types.


@reads_panels
@reads_byte_scales
def native_decoded(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes the weight in registers, a panel of rows at a time, and multiplies and
    adds in float32."""
    forward = problem.product == "matmul"
    name = "decoded" if forward else "decoded_transposed"
    return _product(name, x, stored, problem)


@reads_panels
@reads_byte_scales
def native_decoded_bfloat16(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Rounds the inputs and the decoded weight to bfloat16, multiplies by the CPU's
    bfloat16 instructions, and accumulates in float32."""
    return _product("decoded_bfloat16", x, stored, problem)


@reads_panels
@reads_byte_scales
def native_decoded_integers(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Rounds the inputs to 16-bit integers in a unit of their row, and multiplies them
    by the integers that codes stand for. Scales are applied to sums of these, which are
    exact. Inputs far above the others of their row are multiplied in float32, as are
    rows with many of those.

    Points that are not multiples of one number are rounded to integers of up to 2047.
    """
    # (The bound of `_digits` holds: half of a 32766th of the largest input is less than
    # a 508th of a 127th.)
    points = integer_points(problem.format)
    assert points is not None
    w = with_integer_points(blocks(stored, problem), points)
    return _of_blocks("decoded_integers", x, w, problem)


@reads_panels
@reads_byte_scales
def native_few_integers(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Splits the inputs into three 8-bit digits in a unit of their row, and multiplies
    them by the integers that codes stand for, four at a time. Scales are applied to
    sums of these, which are exact. Inputs far above the others of their row have
    digits in a unit of their own."""
    # (An input is off by at most half of a 254**2th of a unit, which is a 127th of at
    # most 64 times the mean: see `_digits`.)
    points = integer_points(problem.format)
    assert points is not None
    w = with_integer_points(blocks(stored, problem), points)
    return _of_blocks("few_integers", x, w, problem)


def _product(name, x, stored, problem):
    return _of_blocks(name, x, blocks(stored, problem), problem)


def _of_blocks(name, x, w, problem):
    x = x.astype(jnp.float32)
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
    columns = problem.n if problem.product == "matmul" else problem.k
    return call(name, x, w, columns).astype(problem.dtype)


def _before_native(problem: Problem) -> str | None:
    reason = refuse(problem)
    if reason is not None or refuse_digits(problem) is not None:
        return reason
    base = radix(grid(problem))
    assert problem.rows is not None
    if native_decodes_first(base, problem.rows, integers=library.level() >= 2):
        return None
    return f"is slower than `native` for this number of rows, {problem.rows}"


def _across_blocks(problem: Problem) -> str | None:
    reason = refuse(problem)
    if reason is not None or not isinstance(problem.format, AbstractGrid):
        return reason
    # What XLA's tiles do not decode, they do not decode faster.
    return None if refuse_grid(problem) else refuse_many_across(problem)


def _rounds_to_bfloat16(problem: Problem) -> str | None:
    reason = refuse(problem)
    if reason is not None:
        return reason
    if library.level() < 3:
        return "needs a CPU with bfloat16 instructions (AVX512_BF16)"
    if isinstance(problem.format, AbstractGrid) and problem.format.radix == 3:
        return f"needs codes of whole bits, got {problem.format}"
    assert problem.rows is not None
    if problem.rows < native_decoded_bfloat16_rows:
        return f"is for {native_decoded_bfloat16_rows} rows or more, got {problem.rows}"
    size = problem.format.block_size or problem.k
    if size >= _integer_block(problem) and _has_integers(problem):
        return f"is less accurate than `native_integers`, and as fast, for {size} codes"
    return refuse_small(problem)


def _integer_block(problem):
    # Tiles add up bfloat16 over blocks, but integers have to leave them after each.
    many = library.level() >= 4 and problem.rows >= native_tile_rows
    if many and problem.activation is None:
        return native_tile_block
    return native_integer_block


def _faster_in_bfloat16(problem: Problem) -> str | None:
    reason = _rounds_to_bfloat16(problem) or library.refuse_slow_bfloat16()
    if reason is not None or library.level() >= 4:
        return reason
    base = _base(problem)
    assert problem.rows is not None
    if base == 2 and problem.rows < native_decoded_integer_rows(base):
        return f"is slower than `native` for {problem.format}"
    return None


def _base(problem):
    """In which base codes are digits of bytes, or `None` if `native` does not know how
    they are packed."""
    known = isinstance(problem.format, AbstractGrid) and refuse_digits(problem) is None
    return radix(grid(problem)) if known else None


def _rounds_to_integers(problem: Problem, most: float) -> str | None:
    """`most`: the largest error of a point."""
    reason = refuse(problem)
    if reason is not None:
        return reason
    if library.level() < 2:
        return "needs a CPU with 16-bit integer products (AVX512, VNNI)"
    points = integer_points(problem.format)
    if points is None or points.error > most:
        return f"needs points that are near to integers, not those of {problem.format}"
    return refuse_small(problem)


def _faster_in_integers(problem: Problem, most: float) -> str | None:
    reason = _rounds_to_integers(problem, most)
    if reason is not None:
        return reason
    base = _base(problem)
    integers = base is not None and _has_integers(problem)
    if library.level() >= 4 and (integers or _rounds_to_bfloat16(problem) is None):
        return "is slower than the tiles of AMX"
    least = native_decoded_integer_rows(base)
    assert problem.rows is not None
    if problem.rows < least:
        return f"is for {least} rows or more, got {problem.rows}"
    if integers:
        channels = base == 256 and grid(problem).block_size is None
        if channels or isinstance(problem.activation, Int8):
            return "is slower than `native_integers`"
    return None


# As `kFewPartRows` of `src/kernels.h`.
_most_split = 16


def _splits_few(problem: Problem) -> str | None:
    reason = _rounds_to_integers(problem, _exact)
    if reason is not None:
        return reason
    if problem.highest:
        return "keeps its error for most weights, but not for all"
    if not has_fours(problem.format, problem.k):
        return f"does not know how to take four codes of {problem.format} at a time"
    assert problem.rows is not None
    if problem.rows > _most_split:
        return f"is for at most {_most_split} rows, got {problem.rows}"
    return None


def _faster_split(problem: Problem) -> str | None:
    reason = _splits_few(problem)
    if reason is not None:
        return reason
    format = problem.format
    assert problem.rows is not None
    if problem.rows == 1 and isinstance(format, Q6_K):
        return "is slower than `native_decoded` for blocks of 16 codes of 6 bits"
    if problem.rows > native_split_rows:
        return f"is slower than others for this number of rows, {problem.rows}"
    if problem.layout.panels or not isinstance(format, AbstractGrid):
        return None
    if format.bits == 8:
        return "is slower than others for codes of 8 bits"
    if refuse_digits(problem) is None:
        if radix(grid(problem)) != 16 or integer_step(grid(problem)) is None:
            return f"is slower than `native` for {format}"
        size = format.block_size or problem.k
        if size < native_split_block:
            return f"is slower than `native` for codes in blocks of {size}"
    return None


def _has_integers(problem):
    # (`native_integers` reads rows side by side.)
    if problem.layout.panels or not isinstance(problem.format, AbstractGrid):
        return False
    return refuse_integers(problem) is None


for _type, _activation in it.product(
    (AbstractGrid, Int4, AbstractGGUFBlocks, AbstractCodebook), (None, AbstractFormat)
):
    _register = ft.partial(register_kernel, format_type=_type, activation=_activation)
    _register("matmul", priority=8, supports=refuse)(native_decoded)
    _register("matmul_transposed", priority=8, supports=_across_blocks)(native_decoded)
    # Twice: where it is not the fastest, it still runs if it is asked for.
    _register("matmul", priority=11.5, supports=_faster_in_bfloat16, error=8e-3)(
        native_decoded_bfloat16
    )
    _register("matmul", priority=2.4, supports=_rounds_to_bfloat16, error=8e-3)(
        native_decoded_bfloat16
    )

# The largest relative errors of points that are rounded to integers: where they are
# multiples of one number, but for rounding to float32, and where they are not.
_exact, _rounded = 1e-6, 2e-3

for _type, _activation, _most in it.product(
    (AbstractGrid, Int4, NF4, AbstractGGUFBlocks, AbstractCodebook),
    (None, AbstractFormat),
    (_exact, _rounded),
):
    _register = ft.partial(
        register_kernel,
        "matmul",
        _type,
        activation=_activation,
        error=error + _most,
        provided=provided,
    )
    # (What has the larger error comes second.)
    _faster = ft.partial(_faster_in_integers, most=_most)
    _register(priority=12.5 - _most, supports=_faster)(native_decoded_integers)
    # Where it is not the fastest, it still runs if it is asked for. (What is for a type
    # comes before all of its base classes.)
    if _type not in (Int4, NF4):
        _possible = ft.partial(_rounds_to_integers, most=_most)
        _register(priority=2.3 - _most, supports=_possible)(native_decoded_integers)

for _type, _activation in it.product(
    (AbstractGrid, Int4, AbstractGGUFBlocks), (None, AbstractFormat)
):
    _register = ft.partial(
        register_kernel,
        "matmul",
        _type,
        activation=_activation,
        error=1e-5,
        provided=provided,
    )
    _register(priority=13, supports=_faster_split)(native_few_integers)
    # Where it is not the fastest, it still runs if it is asked for.
    _register(priority=2.6, supports=_splits_few)(native_few_integers)

for _type, _activation in it.product(
    (AbstractGrid, Int4), (None, Int8, AbstractFormat)
):
    register_kernel(
        "matmul",
        _type,
        activation=_activation,
        priority=10.5,
        supports=_before_native,
    )(native_decoded)
