import functools as ft

from jaxtyping import Array, Float

from ...formats import (
    AbstractCodebook,
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGrid,
    Stored,
)
from .._adapted import reads_byte_scales, reads_panels
from .._digits import error, provided
from .._problem import Problem
from .._table import register_kernel
from ..cpu._costs import measured
from ..cpu._tiles import refuse_small
from . import _library as library
from ._weight import (
    has_fours,
    integer_points,
    multiply,
    refuse,
    weight,
    with_integer_points,
)


# Kernels for all formats of blocks: codes of 1 to 8 bits, which are integers or points
# of a table, with any offset, or packed like GGUF's types.


@reads_panels
@reads_byte_scales
def native_decoded(
    x: Float[Array, "m _"], stored: Stored, problem: Problem
) -> Float[Array, "m _"]:
    """Decodes the weight in registers, a panel of rows at a time, and multiplies and
    adds in float32."""
    product = "float32" if problem.product == "matmul" else "float32_across"
    return multiply(product, x, weight(stored, problem), problem)


@reads_panels
@reads_byte_scales
def native_decoded_bfloat16(
    x: Float[Array, "m k"], stored: Stored, problem: Problem
) -> Float[Array, "m n"]:
    """Rounds the inputs and the decoded weight to bfloat16, multiplies by the CPU's
    bfloat16 instructions, and accumulates in float32."""
    return multiply("bfloat16", x, weight(stored, problem), problem)


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
    w = with_integer_points(weight(stored, problem), problem.format)
    return multiply("int16", x, w, problem)


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
    w = with_integer_points(weight(stored, problem), problem.format)
    return multiply("int8_few_rows", x, w, problem)


def _rounds_to_bfloat16(problem: Problem) -> str | None:
    if reason := refuse(problem):
        return reason
    if not library.has("bfloat16"):
        return "needs a CPU with bfloat16 products (AVX512_BF16)"
    if isinstance(problem.format, AbstractGrid) and problem.format.radix == 3:
        return f"needs codes of whole bits, got {problem.format}"
    return refuse_small(problem)


# The largest relative errors of points that are rounded to integers: if they are
# multiples of one number up to rounding to float32, and if they are not.
_exact, _rounded = 1e-6, 2e-3


def _rounds_to_integers(problem: Problem, most: float = _rounded) -> str | None:
    """Returns why points cannot be rounded to integers with relative errors up to
    `most`, or `None`."""
    if reason := refuse(problem):
        return reason
    if not library.has("int16"):
        return "needs a CPU with 16-bit integer products"
    points = integer_points(problem.format)
    if points is None or points.error > most:
        return f"needs points that are near integers, got {problem.format}"
    return refuse_small(problem)


def _error_of_integers(problem: Problem) -> float:
    points = integer_points(problem.format)
    exact = points is not None and points.error <= _exact
    return error + (_exact if exact else _rounded)


def _splits_few(problem: Problem) -> str | None:
    if reason := _rounds_to_integers(problem, _exact):
        return reason
    if not library.has("int8_few_rows"):
        return "needs a CPU with 8-bit integer products"
    if problem.highest:
        return "keeps its error for most weights, but not for all"
    if not has_fours(problem.format, problem.k):
        return f"does not know how to take four codes of {problem.format} at a time"
    assert problem.rows is not None
    most = library.number("few_part_rows")
    if problem.rows > most:
        return f"is for at most {most} rows, got {problem.rows}"
    return None


_register = ft.partial(
    register_kernel,
    format_type=(AbstractGrid, AbstractGGUFBlocks, AbstractCodebook),
    activation=(None, AbstractFormat),
    any_length=True,
)
_register(
    ("matmul", "matmul_transposed"),
    supports=refuse,
    seconds=measured("native_decoded"),
)(native_decoded)
_register(
    "matmul",
    supports=_rounds_to_bfloat16,
    error=8e-3,
    seconds=measured("native_decoded_bfloat16"),
)(native_decoded_bfloat16)
_register(
    "matmul",
    supports=_rounds_to_integers,
    error=_error_of_integers,
    provided=provided,
    seconds=measured("native_decoded_integers"),
)(native_decoded_integers)
_register(
    "matmul",
    supports=_splits_few,
    provided=provided,
    seconds=measured("native_few_integers"),
)(native_few_integers)
