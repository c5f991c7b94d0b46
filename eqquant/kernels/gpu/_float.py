import dataclasses
import functools as ft
import itertools as it
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...formats import (
    AbstractFormat,
    AbstractGGUFBytes,
    AbstractGrid,
    from_bits,
    round_trip,
)
from .._adapted import of_base, on_base
from .._finite import infinite_as_nan
from .._problem import Problem
from .._table import register_kernel
from ._decoded import decoded
from ._devices import hopper
from ._parts import in_parts
from ._plan import plan
from ._product import product, unit_of
from ._rows import by_eights, padded
from ._seconds import predicted
from ._words import of_bytes, Points, points_of, to_bytes


def bfloat16_wgmma(
    x: Float[Array, "m k"],
    stored: dict[str, Array],
    problem: Problem,
    interpret: Any = None,
) -> Float[Array, "m n"]:
    """Decodes codes to bfloat16 in registers, which `wgmma` reads as its operand, and
    accumulates in float32."""
    if problem.activation is not None:
        x = round_trip(x, problem.activation)
        problem = dataclasses.replace(problem, activation=None)
    found = _reading(_grid(problem))
    is_packed = found is not None and found[1]
    product = _of_eights if is_packed else in_parts(_of_eights)
    return product(x, stored, problem, interpret=interpret)


def _of_eights(x, stored, problem, interpret):
    most = ft.partial(_product, interpret=interpret)
    return by_eights(most, decoded, x, stored, problem)


@in_parts
def swapped_wgmma(
    x: Float[Array, "m k"],
    stored: dict[str, Array],
    problem: Problem,
    interpret: Any = None,
) -> Float[Array, "m n"]:
    """Swaps the axes of the stored arrays in memory, some rows at a time, and goes on
    as `bfloat16_wgmma`. `eqq.tree_prepack(model, platform="gpu")` swaps them once."""
    rows = problem.layout.to_rows(stored)
    return bfloat16_wgmma(x, rows, _rows_first(problem), interpret)


def _rows_first(problem):
    layout = dataclasses.replace(problem.layout, row_axis=-2)
    return dataclasses.replace(problem, layout=layout)


def _product(x, stored, problem, interpret):
    format, dtype = _grid(problem), problem.dtype
    found = _reading(format)
    assert found is not None
    points, is_packed = found
    codes = stored["codes"]
    if not is_packed:
        codes = to_bytes(codes, format)[:, : _bytes_of_row(problem, points, is_packed)]
    n, j = codes.shape
    p, block = points.per_byte, format.block_size
    scaling = [stored[name] for name in ("scale", format.offset) if name in stored]
    if block is None and format.offset is not None:
        # Treat the row as one long block.
        block = -(-j * p // 256) * 256
    sizes = [] if block is None else [a.dtype.itemsize for a in scaling]
    minima = format.offset == "minimum"
    pieces = plan(x.shape[0], n, j, p, dtype.itemsize, block, sizes, minima)
    # Pads `x` with zeros, which multiply the unused codes of the last byte and of the
    # last `wgmma`.
    size = -(-j * p // unit_of(block)) * unit_of(block)
    more = padded(x.shape[0]) - x.shape[0]
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, more), (0, size - x.shape[1])))
    if block is None:
        scale = from_bits(stored["scale"], format.scale_dtype)[:, 0]
        scale = jnp.broadcast_to(infinite_as_nan(scale), (n,))
        scaling = [jnp.pad(scale, (0, -n % pieces.channels))]
    else:
        scaling = [_aligned(jnp.broadcast_to(a, (n, a.shape[1]))) for a in scaling]
    y = product(
        x,
        codes,
        *scaling,
        points=points,
        kind=format.offset,
        scale_dtype=format.scale_dtype,
        block=block,
        plan=pieces,
        dtype=dtype if pieces.splits == 1 else jnp.float32,
        interpret=interpret,
    )
    y = y[:, : y.shape[1] - more]
    return y[0] if pieces.splits == 1 else jnp.sum(y, axis=0).astype(dtype)


def _grid(problem):
    assert isinstance(problem.format, AbstractGrid)
    return problem.format


def _reading(format: AbstractGrid) -> tuple[Points, bool] | None:
    """Returns how to decode the codes of a format, and whether they are decoded as they
    are packed. Other codes are first unpacked to a byte each: this takes a pass over
    the weight, but less time than decoding it to memory. Returns `None` if neither is
    possible."""
    for points, is_packed in ((points_of(format), True), (of_bytes(format), False)):
        # All codes of a call of `wgmma`, and of a thread's word, must belong to the
        # same block.
        block = format.block_size
        if points is not None and (
            block is None
            or block % 256 == 0
            or (256 % block == 0 and block >= 16 * points.per_byte)
        ):
            return points, is_packed
    return None


def reads_packed(format: AbstractFormat) -> bool:
    """Whether the kernels for Hopper decode the codes of a format as they are
    packed."""
    found = _reading(format) if isinstance(format, AbstractGrid) else None
    return found is not None and found[1]


def _bytes_of_row(problem, points, is_packed):
    if not is_packed and problem.k % 32 == 0:
        return problem.k
    return (problem.k + problem.tail) // points.per_byte


def _aligned(a):
    # TMA, the unit that copies tiles, needs rows whose size is a multiple of 16 bytes.
    return jnp.pad(a, ((0, 0), (0, -a.shape[1] % (16 // a.dtype.itemsize))))


def refuse(problem: Problem) -> str | None:
    """Returns why no kernel for Hopper applies to a problem, or `None` if one may."""
    if (reason := hopper()) is not None:
        return reason
    if problem.empty:
        return "needs non-empty operands"
    if problem.n < 8:
        return f"needs weights of at least 8 rows, got {problem.n}"
    if problem.row_axis != -2:
        return (
            "needs the contracted axis last in memory: "
            '`eqq.tree_prepack(model, platform="gpu")` puts it there'
        )
    if problem.dtype.itemsize > 4:
        return f"supports dtypes up to float32, got {problem.dtype.name}"
    if problem.rows is None:
        return "needs a static number of rows"
    return None


# Measured on an H100: up to about this many rows, decoding each tile of the weight
# where it is used takes less time than writing the decoded weight to memory and reading
# it back.
_most_rows = 1024


def _supports(problem: Problem) -> str | None:
    if (reason := refuse(problem)) is not None:
        return reason
    if isinstance(problem.format, AbstractGGUFBytes):
        problem = of_base(problem)
    format, rows = _grid(problem), problem.rows
    if format.ordered:
        return f"needs blocks of consecutive positions, got {format}"
    if rows is not None and rows > _most_rows:
        return (
            f"is for at most {_most_rows} rows, got {rows}: for more, "
            "it is faster to decode the weight once"
        )
    if (found := _reading(format)) is None:
        return (
            "needs integers, 8-bit floats or a table of 16 points, in blocks whose "
            f"size is a power of two up to 256, or a multiple of 256, got {format}"
        )
    size = _bytes_of_row(problem, *found)
    if size % 32 != 0:
        return f"needs rows whose size is a multiple of 32 bytes, got {size}"
    return None


def _supports_swapped(problem: Problem) -> str | None:
    if problem.portable:
        return (
            "does not run in exported programs, which other GPUs than Hopper may run, "
            'unless `eqq.tree_prepack(model, platform="gpu")` prepared the weight'
        )
    return _supports(_rows_first(problem))


def _seconds(written: int) -> Callable[[Problem], float]:
    packed, unpacked = predicted(written, 0.4), predicted(written + 1, 0.4)

    def seconds(problem):
        if isinstance(problem.format, AbstractGGUFBytes):
            return unpacked(problem)
        found = _reading(_grid(problem))
        return (packed if found is None or found[1] else unpacked)(problem)

    return seconds


for _type, (_kernel, _supported, _written) in it.product(
    (AbstractGrid, AbstractGGUFBytes),
    ((bfloat16_wgmma, _supports, 0), (swapped_wgmma, _supports_swapped, 1)),
):
    register_kernel(
        "matmul",
        _type,
        "cuda",
        activation=(None, AbstractFormat),
        supports=_supported,
        # Inputs and weights are rounded to bfloat16. A weight is rounded up to three
        # times: the point of a table, the scale, and their product.
        error=8e-3,
        seconds=_seconds(_written),
    )(_kernel if _type is AbstractGrid else in_parts(on_base(_kernel)))
