from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Shaped

from ...formats import (
    AbstractFormat,
    AbstractGrid,
    AbstractRSR,
    AbstractScaled,
    per_byte,
    Stored,
)
from .._problem import Problem
from ..cpu._codes import (
    grid,
    integer_step,
    point_table,
    radix,
    refuse_grid,
    refuse_layout,
)
from . import _library as library


class Weight(NamedTuple):
    """A weight as the functions of the native library take it.

    - `operands`: the codes, the scales and their factor, the zero-points, and a table
      of the points that digits stand for.
    - `attributes`: the static attributes of the FFI call.
    - `per`: the number of digits in a byte.
    - `used`: how many of these, from the first, are codes.
    """

    operands: tuple[Shaped[Array, "..."], ...]
    attributes: dict[str, Any]
    per: int
    used: int


def weight(stored: Stored, problem: Problem) -> Weight:
    """The operands and attributes of a weight."""
    format, codes = problem.format, stored["codes"]
    if isinstance(format, AbstractRSR):
        base, used, size = format.levels, format.k, None
        digits = format.domain[0] + np.arange(base, dtype=np.float32)
        scale = jnp.full((1, 1), np.float32(1).view(np.uint32))
        kind_of_scale, offset = np.int32(library.number("scale.float32")), None
    else:
        format = grid(problem)
        base, size = radix(format), format.block_size
        used = per_byte(base)
        digits = np.zeros(0, np.float32) if base == 256 else point_table(format)
        scale, kind_of_scale = stored["scale"], scale_type(problem)
        offset = integer_offset(format)
    table = np.zeros(16, np.float32)
    table[: len(digits)] = digits
    zero = stored.get("zero_point", jnp.zeros((0, 0), jnp.uint8))
    attributes = dict(
        kind=np.int32(library.number(f"codes.{base}")),
        block=np.int64(codes.shape[0] if size is None else size // used),
        scale_type=kind_of_scale,
        offset=np.int32(offset or 0),
        used=np.int32(used),
        k=np.int64(problem.k),
        set=np.int32(library.number_of_set()),
    )
    factor = factor_of_scales(stored, problem)
    operands = (codes, scale, factor, zero, jnp.asarray(table)[None])
    return Weight(operands, attributes, per_byte(base), used)


def scale_type(problem: Problem) -> np.int32:
    """The `ScaleType` of a weight."""
    scales = problem.byte_scales
    if scales is not None:
        inverse = ".inverse" if scales.inverse else ""
        return np.int32(library.number(f"scale.{scales.dtype.name}{inverse}"))
    assert isinstance(problem.format, AbstractScaled)
    return np.int32(library.number(f"scale.{problem.format.scale_dtype.name}"))


def factor_of_scales(stored: Stored, problem: Problem) -> Shaped[Array, "..."]:
    """The bits of what the scales of a matrix are multiplied or divided by. Empty if
    that is nothing."""
    scales = problem.byte_scales
    if scales is None or scales.factor is None:
        return jnp.zeros((0, 0), jnp.uint32)
    return stored[scales.factor]


def integer_offset(format: AbstractFormat) -> int | None:
    """The integer to subtract from each code (or, for codes of one bit, from twice the
    code) to get its point. `None` if the points are not such integers."""
    step = integer_step(format)
    if not isinstance(format, AbstractGrid) or step is None:
        return None
    if step[0] != (2 if format.radix == 2 else 1):
        return None
    # (The library adds 128 to codes of 8 bits, to make them unsigned.)
    return 128 - step[1] if format.radix == 256 else -step[1]


def call(
    name: str, x: list[Shaped[Array, "m _"]], w: Weight, columns: int
) -> Float[Array, "m _"]:
    """Calls a function of the native library on inputs and a weight."""
    result = jax.ShapeDtypeStruct((x[0].shape[0], columns), jnp.float32)
    # Under `vmap`, a stack of weights is one call.
    function = jax.ffi.ffi_call(f"eqquant_{name}", result, vmap_method="broadcast_all")
    return function(*x, *w.operands, **w.attributes)


def by_digit(x: Shaped[Array, "m k"], w: Weight) -> Shaped[Array, "m _"]:
    """Aligns inputs with the digits of the weight: one input for each digit, zero where
    the digit is not a code."""
    m, k = x.shape
    number = w.operands[0].shape[0]
    if k == number * w.per:
        return x
    x = jnp.pad(x, ((0, 0), (0, number * w.used - k)))
    x = x.reshape(m, number, w.used)
    x = jnp.pad(x, ((0, 0), (0, 0), (0, w.per - w.used)))
    return x.reshape(m, number * w.per)


def refuse_library(problem: Problem) -> str | None:
    """Why the native library cannot be called for a problem of any format, or
    `None`."""
    missing = library.missing()
    if missing is not None:
        return missing
    if problem.portable:
        return "would tie the exported program to machines that have its library"
    if problem.rows is None:
        return "needs to know the number of rows when compiling"
    return None


def refuse(problem: Problem) -> str | None:
    """Why no kernel of the native library applies to a problem, or `None`."""
    reason = refuse_library(problem)
    if reason is not None:
        return reason
    format = problem.format
    if isinstance(format, AbstractRSR):
        if format.levels**format.k > 256:
            return f"needs codes of one byte, got {format}"
        return refuse_layout(problem)
    reason = refuse_grid(problem)
    if reason is not None:
        return reason
    format = grid(problem)
    if format.offset == "zero_point" and radix(format) != 16:
        return f"needs zero-points to be of 4-bit codes, got {format}"
    if not library.knows(f"codes.{radix(format)}"):
        return f"needs 2, 3, 4, 16 or 256 codes, got {format}"
    if radix(format) == 256 and integer_step(format) != (1, 0):
        return f"needs codes of 8 bits to be integers, got {format}"
    if format.block_size is not None and format.block_size % per_byte(radix(format)):
        return f"needs blocks that end with a byte, got {format}"
    return None
