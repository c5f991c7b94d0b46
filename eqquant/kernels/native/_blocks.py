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
    Int8,
    per_byte,
    Stored,
)
from .._problem import Problem
from ..cpu._codes import (
    compute_now,
    integer_step,
    refuse_layout,
)
from . import _library as library
from ._call import factor_of_scales, integer_offset, refuse_library, scale_type


class Blocks(NamedTuple):
    """A weight of any format of blocks, as the functions of the native library that
    decode it take it.

    - `operands`: the codes, the scales or a codebook, the factor of the scales, the
      zero-points or minima, and a table of points.
    - `attributes`: the static attributes of the FFI call.
    """

    operands: tuple[Shaped[Array, "..."], ...]
    attributes: dict[str, Any]


def blocks(stored: Stored, problem: Problem) -> Blocks:
    """The operands and attributes of a weight."""
    format = problem.format
    none = jnp.zeros((0, 0), jnp.uint8)
    if isinstance(format, AbstractGGUFBytes):
        base = format.base
        codes, scale, offset = stored["blocks"], none, none
        if isinstance(format, AbstractCodebook):
            scale = jnp.asarray(format.codebook.points)[None]
    else:
        assert isinstance(format, AbstractGrid)
        base = format
        codes, scale = stored["codes"], stored["scale"]
        offset = none if base.offset is None else stored[base.offset]
    packing = _packing(format)
    assert packing is not None
    kind, zero, table = _points(base)
    if isinstance(format, AbstractCodebook):
        # Of unsigned bytes in memory.
        kind = "integers"
    attributes = dict(
        packing=np.int32(packing),
        block=np.int64(base.block_size or problem.k),
        scale_type=scale_type(problem),
        offset_type=np.int32(library.number(f"offset.{base.offset}")),
        point_type=np.int32(library.number(f"points.{kind}")),
        base=np.int32(zero),
        k=np.int64(problem.k),
        in_panels=problem.layout.panels is not None,
        set=np.int32(library.number_of_set()),
        unit=np.float32(1),
    )
    factor = factor_of_scales(stored, problem)
    operands = (codes, scale, factor, offset, jnp.asarray(table)[None])
    return Blocks(operands, attributes)


class IntegerPoints(NamedTuple):
    """What codes stand for as 16-bit integers.

    - `table`: these integers, if codes are looked up.
    - `unit`: what they are multiplied by.
    - `error`: the largest error of a point, relative to it.
    """

    table: Float[np.ndarray, " 256"]
    unit: float
    error: float


# The largest integer that stands for a point of a table: 32 products of it with inputs
# of 16 bits add up to less than 32 bits.
_most = 2047


@ft.cache
def integer_points(format: AbstractFormat) -> IntegerPoints | None:
    """The points of a format as integers, if all but zeros are near to integers;
    otherwise `None`."""
    grid = format.base if isinstance(format, AbstractGGUFBytes) else format
    assert isinstance(grid, AbstractGrid)
    kind, _, table = _points(grid)
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

    # (Of those that are as good, the one with the smallest integers.)
    number = min(range(1, _most + 1), key=lambda number: round(error(number), 6))
    found = np.round(table * (number / largest)).astype(np.float32)
    return IntegerPoints(found, float(largest) / number, error(number))


def with_integer_points(w: Blocks, points: IntegerPoints) -> Blocks:
    """The same weight, with points that are integers."""
    *operands, _ = w.operands
    return Blocks(
        (*operands, jnp.asarray(points.table)[None]),
        w.attributes | dict(unit=np.float32(points.unit)),
    )


def has_fours(format: AbstractFormat, k: int) -> bool:
    """Whether four codes of a row of `k` can be brought into a lane of 8-bit integers:
    see `src/weight/quads.h`."""
    base = format.base if isinstance(format, AbstractGGUFBytes) else format
    assert isinstance(base, AbstractGrid)
    packing, points = _packing(format), integer_points(format)
    if packing is None or points is None:
        return False
    return library.has_fours(
        packing,
        library.number(f"points.{_points(base)[0]}"),
        library.number(f"offset.{base.offset}"),
        base.block_size or k,
        k,
        points.table,
    )


def is_far_apart(format: AbstractFormat) -> bool:
    """Whether the bits of each code are in bytes that are 64 or more from each other:
    of a panel, in several pages of memory."""
    if not isinstance(format, AbstractGGUFBlocks):
        return False
    return all(abs(code[0].byte - code[-1].byte) >= 64 for code in format.fields.codes)


def _packing(format: AbstractFormat) -> int | None:
    """The number of a packing in the library. `None` if it does not know it."""
    if isinstance(format, AbstractGGUFBytes):
        name = type(format).__name__
        ours = getattr(formats, name, None) is type(format)
        name = f"packing.{name}"
        return library.number(name) if ours and library.knows(name) else None
    assert isinstance(format, AbstractGrid)
    if format.radix is None:
        return library.number(f"packing.{int(format.bits)}")
    if per_byte(format.radix) == 1:
        return library.number("packing.8")
    name = {16: "4", 4: "2", 3: "trits", 2: "1"}.get(format.radix)
    return None if name is None else library.number(f"packing.{name}")


@ft.cache
def _points(format: AbstractGrid) -> tuple[str, int, Float[np.ndarray, " 256"]]:
    """What codes stand for: the `PointType`, the code of zero if points are integers,
    and a table of all points."""
    table = np.zeros(256, np.float32)
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


def call(
    name: str, x: Float[Array, "m _"], w: Blocks, columns: int
) -> Float[Array, "m _"]:
    """Calls a function of the native library on inputs and a weight."""
    result = jax.ShapeDtypeStruct((x.shape[0], columns), jnp.float32)
    # Under `vmap`, a stack of weights is one call.
    function = jax.ffi.ffi_call(f"eqquant_{name}", result, vmap_method="broadcast_all")
    return function(x, *w.operands, **w.attributes)


def refuse(problem: Problem) -> str | None:
    """Why no kernel that decodes blocks applies to a problem, or `None`."""
    reason = refuse_library(problem) or _refuse_format(problem.format)
    if reason is not None:
        return reason
    return refuse_layout(problem)


def gains_by_panels(format: AbstractFormat, activation: AbstractFormat | None) -> bool:
    """Whether products with few rows are faster if the rows of a weight lie in panels,
    on this machine, and those with many are not slower: see `Layout`."""
    if library.missing() is not None or "avx512" not in library.features():
        return False
    if isinstance(activation, Int8) and activation.block_size is None:
        if isinstance(format, AbstractGrid) and integer_offset(format) is not None:
            # `native_integers` reads rows side by side.
            return False
    if isinstance(format, AbstractGGUFBytes):
        return isinstance(format, AbstractGGUFBlocks) and not is_far_apart(format)
    while isinstance(format, AbstractComposite):
        if not format.by_element:
            # Its scales are decoded for each product, and laid in panels again.
            return False
        format = format.base
    # (Of codes of up to 2 bits, `native` looks up sums of inputs.)
    grid = isinstance(format, AbstractGrid) and format.radix not in (2, 3, 4)
    return grid and _refuse_format(format) is None


def _refuse_format(format: AbstractFormat) -> str | None:
    if isinstance(format, AbstractGGUFBytes):
        known = _packing(format) is not None
        return None if known else f"does not know how {format} packs its codes"
    assert isinstance(format, AbstractGrid)
    if format.ordered:
        return f"needs blocks that are runs of positions, got {format}"
    if format.code_dtype == np.int8:
        integers = integer_step(format) == (1, 0)
        return None if integers else f"needs signed codes to be integers, got {format}"
    if _packing(format) is None:
        return f"needs 3 codes or codes of whole bits, got {format}"
    if format.offset == "zero_point" and _points(format)[:2] != ("integers", 0):
        return f"needs zero-points to be of integers from 0 on, got {format}"
    return None
