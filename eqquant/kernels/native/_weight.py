import functools as ft
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array, Float, Shaped

from ... import formats
from ...formats import (
    AbstractCodebook,
    AbstractComposite,
    AbstractFormat,
    AbstractGGUFBlocks,
    AbstractGGUFBytes,
    AbstractGrid,
    AbstractRSR,
    AbstractScaled,
    Int8,
    per_byte,
    Stored,
)
from .._problem import Problem, rounded_inputs
from ..cpu._codes import (
    compute_now,
    grid,
    integer_step,
    radix,
    refuse_grid,
    refuse_layout,
)
from . import _library as library


class Weight(NamedTuple):
    """A weight as operands of the native library.

    - `operands`: the codes, the scales or a codebook, the factor of the scales, the
      zero-points or minima, and a table of points.
    - `attributes`: the static attributes of the FFI call.
    """

    operands: tuple[Shaped[Array, "..."], ...]
    attributes: dict[str, Any]


def weight(stored: Stored, problem: Problem) -> Weight:
    """Returns the operands and attributes of a weight."""
    format = problem.format
    none = jnp.zeros((0, 0), jnp.uint8)
    scale_type, factor = _scale_type(problem), _factor_of_scales(stored, problem)
    if isinstance(format, AbstractRSR):
        # Every digit of a byte is passed as a code, though some may not be codes.
        block = k = stored["codes"].shape[0] * per_byte(format.levels)
        codes, offset = stored["codes"], none
        scale = jnp.full((1, 1), np.float32(1).view(np.uint32))
        offset_type = None
    elif isinstance(format, AbstractGGUFBytes):
        codes, scale, offset = stored["blocks"], none, none
        if isinstance(format, AbstractCodebook):
            scale = jnp.asarray(format.codebook.points)[None]
        block, k, offset_type = format.base.block_size, problem.k, format.base.offset
    else:
        assert isinstance(format, AbstractGrid)
        codes, scale = stored["codes"], stored["scale"]
        offset = none if format.offset is None else stored[format.offset]
        block, k, offset_type = format.block_size, problem.k, format.offset
    packing = _packing(format)
    assert packing is not None
    kind, zero, table = _points(format)
    if isinstance(format, AbstractCodebook):
        # (Integers because codebooks are unsigned bytes in memory.)
        kind = "integers"
    attributes = dict(
        packing=np.int32(packing),
        block=np.int64(block or k),
        scale_type=scale_type,
        offset_type=np.int32(library.number(f"offset.{offset_type}")),
        point_type=np.int32(library.number(f"points.{kind}")),
        base=np.int32(zero),
        k=np.int64(k),
        in_panels=problem.layout.panels is not None,
        set=np.int32(library.number_of_set()),
        unit=np.float32(1),
    )
    operands = (codes, scale, factor, offset, jnp.asarray(table)[None])
    return Weight(operands, attributes)


def _scale_type(problem: Problem) -> np.int32:
    """Returns the `ScaleType` of a weight."""
    scales = problem.byte_scales
    if scales is not None:
        inverse = ".inverse" if scales.inverse else ""
        return np.int32(library.number(f"scale.{scales.dtype.name}{inverse}"))
    if isinstance(problem.format, AbstractRSR):
        return np.int32(library.number("scale.float32"))
    assert isinstance(problem.format, AbstractScaled)
    return np.int32(library.number(f"scale.{problem.format.scale_dtype.name}"))


def _factor_of_scales(stored: Stored, problem: Problem) -> Shaped[Array, "..."]:
    """Returns the bits of the number by which the scales of a matrix are multiplied or
    divided. Empty if there is no such number."""
    scales = problem.byte_scales
    if scales is None or scales.factor is None:
        return jnp.zeros((0, 0), jnp.uint32)
    return stored[scales.factor]


class IntegerPoints(NamedTuple):
    """The points of codes as 16-bit integers.

    - `table`: these integers, if codes are looked up.
    - `unit`: the number by which they are multiplied.
    - `error`: the largest error of a point, relative to the point.
    """

    table: Float[np.ndarray, " 256"]
    unit: float
    error: float


# The largest integer that stands for a point of a table: the sum of 32 products with
# inputs of 16 bits fits into 32 bits.
_most = 2047


@ft.cache
def integer_points(format: AbstractFormat) -> IntegerPoints | None:
    """Returns the points of a format as integers, if all but zeros are near integers;
    otherwise `None`."""
    kind, _, table = _points(format)
    if kind in ("integers", "signed") or isinstance(format, AbstractCodebook):
        return IntegerPoints(table, 1.0, 0.0)
    largest = np.abs(table).max()
    if kind != "table" or not 0 < largest < np.inf:
        return None
    table = table.astype(np.float64)
    points = table[table != 0]

    def error(number):
        scaled = points * (number / largest)
        return float(np.max(np.abs(np.round(scaled) / scaled - 1)))

    # (Among equally good numbers, the one that gives the smallest integers.)
    number = min(range(1, _most + 1), key=lambda number: round(error(number), 6))
    found = np.round(table * (number / largest)).astype(np.float32)
    return IntegerPoints(found, float(largest) / number, error(number))


def with_integer_points(w: Weight, format: AbstractFormat) -> Weight:
    """Replaces the points of a weight by integers."""
    points = integer_points(format)
    assert points is not None
    *operands, _ = w.operands
    return Weight(
        (*operands, jnp.asarray(points.table)[None]),
        w.attributes | dict(unit=np.float32(points.unit)),
    )


def has_fours(format: AbstractFormat, k: int) -> bool:
    """Whether four codes of a row of `k` can be brought into a lane of 8-bit integers
    (see `src/weight/quads.h`)."""
    base = format.base if isinstance(format, AbstractGGUFBytes) else format
    assert isinstance(base, AbstractGrid)
    packing, points = _packing(format), integer_points(format)
    if packing is None or points is None:
        return False
    return library.has_fours(
        packing,
        library.number(f"points.{_points(format)[0]}"),
        library.number(f"offset.{base.offset}"),
        base.block_size or k,
        k,
        points.table,
    )


def is_far_apart(format: AbstractFormat) -> bool:
    """Whether the bits of each code are in bytes that are at least 64 apart. In a
    panel, these are in several pages of memory."""
    if not isinstance(format, AbstractGGUFBlocks):
        return False
    return all(abs(code[0].byte - code[-1].byte) >= 64 for code in format.fields.codes)


def _packing(format: AbstractFormat) -> int | None:
    """Returns the library's number for a packing, or `None` if it has none."""
    if isinstance(format, AbstractGGUFBytes):
        name = type(format).__name__
        ours = getattr(formats, name, None) is type(format)
        name = f"packing.{name}"
        return library.number(name) if ours and library.knows(name) else None
    if isinstance(format, AbstractRSR):
        radix = format.levels
    else:
        assert isinstance(format, AbstractGrid)
        radix = format.radix
        if radix is None:
            return library.number(f"packing.{int(format.bits)}")
    if per_byte(radix) == 1:
        return library.number("packing.8")
    name = {16: "4", 4: "2", 3: "trits", 2: "1"}.get(radix)
    return None if name is None else library.number(f"packing.{name}")


@ft.cache
def _points(format: AbstractFormat) -> tuple[str, int, Float[np.ndarray, " 256"]]:
    """Returns the points of codes: the `PointType`, the code of zero if points are
    integers, and a table of all points."""
    table = np.zeros(256, np.float32)
    if isinstance(format, AbstractGGUFBytes):
        format = format.base
    if isinstance(format, AbstractRSR):
        codes = np.arange(format.levels, dtype=np.uint8)
        points = codes.astype(np.float32) + np.float32(format.domain[0])
    else:
        assert isinstance(format, AbstractGrid)
        if format.code_dtype == np.int8:
            return "signed", 0, table
        codes = np.arange(format.levels, dtype=np.uint8)
        points = compute_now(lambda: format.to_points(jnp.asarray(codes)))
    table[: len(points)] = points
    zero = -points[0]
    if 0 <= zero <= 255 and np.array_equal(points, codes - zero):
        return "integers", int(zero), table
    for kind, dtype in (
        ("e4m3", ml_dtypes.float8_e4m3fn),
        ("e5m2", ml_dtypes.float8_e5m2),
    ):
        floats = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        if np.array_equal(table, floats, equal_nan=True):
            return kind, 0, table
    return "table", 0, table


def multiply(
    product: str, x: Float[Array, "m _"], w: Weight, problem: Problem
) -> Float[Array, "m _"]:
    """Multiplies inputs, rounded to the format of the problem's activations, by a
    weight.

    - `product`: as in `call`.
    """
    x = rounded_inputs(x, problem)
    if isinstance(problem.format, AbstractRSR):
        y = _by_digits(product, x, w, problem)
    else:
        y = call(product, x, w, problem.n if problem.product == "matmul" else problem.k)
    return y.astype(problem.dtype)


def _by_digits(product, x, w, problem):
    # The weight has a code for each digit of its bytes, but only the first digits
    # belong to inputs or results.
    per, used = per_byte(problem.format.levels), problem.format.k
    number = w.operands[0].shape[0]
    if problem.product == "matmul":
        x = jnp.pad(x, ((0, 0), (0, number * used - problem.k)))
        x = x.reshape(-1, number, used)
        x = jnp.pad(x, ((0, 0), (0, 0), (0, per - used)))
        return call(product, x.reshape(-1, number * per), w, problem.n)
    y = call(product, x, w, number * per).reshape(-1, number, per)[:, :, :used]
    return y.reshape(-1, number * used)[:, : problem.k]


def call(
    product: str,
    x: Shaped[Array, "m _"],
    w: Weight,
    columns: int,
    unit_of_row: Float[Array, "..."] | None = None,
) -> Float[Array, "m _"]:
    """Calls a product of the native library on inputs and a weight.

    - `product`: a name of `products/kernels.h`.
    - `unit_of_row`: the factors of inputs in 8-bit integers, `(m, 1)`.
    """
    result = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    # Under `vmap`, a stack of weights is one call.
    function = jax.ffi.ffi_call("eqquant_product", result, vmap_method="broadcast_all")
    if unit_of_row is None:
        unit_of_row = jnp.zeros((0, 0), jnp.float32)
    number = np.int32(library.number(f"product.{product}"))
    return function(x, unit_of_row, *w.operands, product=number, **w.attributes)


def refuse_library(problem: Problem) -> str | None:
    """Returns why the native library cannot be called for a problem of any format, or
    `None`."""
    missing = library.missing()
    if missing is not None:
        return missing
    if problem.portable:
        return "would tie the exported program to machines that have its library"
    if problem.rows is None:
        return "needs a static number of rows"
    return None


def refuse(problem: Problem) -> str | None:
    """Returns why no kernel that decodes blocks applies to a problem, or `None`."""
    reason = refuse_library(problem) or _refuse_format(problem.format)
    return reason or refuse_layout(problem)


def refuse_in_bytes(problem: Problem) -> str | None:
    """Returns why no kernel that reads whole bytes of codes applies, or `None`."""
    if reason := refuse_library(problem):
        return reason
    format = problem.format
    if isinstance(format, AbstractRSR):
        if format.levels**format.k > 256:
            return f"needs codes of one byte, got {format}"
        return refuse_layout(problem)
    if reason := refuse_grid(problem):
        return reason
    format = grid(problem)
    if format.offset == "zero_point" and radix(format) != 16:
        return f"needs zero-points to be of 4-bit codes, got {format}"
    if radix(format) not in (2, 3, 4, 16, 256):
        return f"needs 2, 3, 4, 16 or 256 codes, got {format}"
    if radix(format) == 256 and integer_step(format) != (1, 0):
        return f"needs codes of 8 bits to be integers, got {format}"
    if format.block_size is not None and format.block_size % per_byte(radix(format)):
        return f"needs blocks that end with a byte, got {format}"
    return None


def are_consecutive(format: AbstractFormat) -> bool:
    """Whether the points of codes are consecutive integers, or for codes of one bit,
    integers that are two apart."""
    step = integer_step(format)
    if not isinstance(format, AbstractGrid) or step is None:
        return False
    return step[0] == (2 if format.radix == 2 else 1)


def gains_by_panels(format: AbstractFormat, activation: AbstractFormat | None) -> bool:
    """Whether panels of rows (see `Layout`) make products with few rows faster on this
    machine, and products with many rows no slower."""
    if library.missing() is not None or "avx512" not in library.features():
        return False
    if isinstance(activation, Int8) and activation.block_size is None:
        if isinstance(format, AbstractGrid) and are_consecutive(format):
            # `native_integers` reads rows side by side.
            return False
    if isinstance(format, AbstractGGUFBytes):
        return isinstance(format, AbstractGGUFBlocks) and not is_far_apart(format)
    while isinstance(format, AbstractComposite):
        if not format.by_element:
            # Its scales are decoded for each product, and would be laid in panels each
            # time.
            return False
        format = format.base
    # (With codes of up to 2 bits, `native` looks up sums of inputs instead.)
    grid = isinstance(format, AbstractGrid) and format.radix not in (2, 3, 4)
    return grid and _refuse_format(format) is None


def _refuse_format(format: AbstractFormat) -> str | None:
    if isinstance(format, AbstractGGUFBytes):
        known = _packing(format) is not None
        return None if known else f"does not know how {format} packs its codes"
    assert isinstance(format, AbstractGrid)
    if format.ordered:
        return f"needs blocks of consecutive positions, got {format}"
    if format.code_dtype == np.int8:
        integers = integer_step(format) == (1, 0)
        return None if integers else f"needs signed codes to be integers, got {format}"
    if _packing(format) is None:
        return f"needs 3 codes or codes of whole bits, got {format}"
    if format.offset == "zero_point" and _points(format)[:2] != ("integers", 0):
        return f"needs zero-points to be of integers from 0 on, got {format}"
    return None
