import dataclasses
import functools as ft
import itertools as it
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

from ...formats import AbstractFormat, from_bits, Int4, Int8, NF4, round_trip, Ternary
from .._finite import infinite_as_nan
from .._problem import Problem
from .._table import register_kernel
from ._decoded import decoded
from ._pallas import hopper
from ._plan import plan
from ._product import product, unit_of
from ._rows import by_eights, padded
from ._words import per_byte


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
    most = ft.partial(_product, interpret=interpret)
    return by_eights(most, decoded, x, stored, problem)


def _product(x, stored, problem, interpret):
    format, codes, dtype = problem.format, stored["codes"], problem.dtype
    n, j = codes.shape
    p, block = per_byte(format), format.block_size
    scaling = [stored[name] for name in ("scale", "zero_point") if name in stored]
    if block is None and len(scaling) == 2:
        # A zero-point has to be subtracted before the product: treat the row as one
        # long block.
        block = -(-j * p // 256) * 256
    sizes = [] if block is None else [a.dtype.itemsize for a in scaling]
    pieces = plan(x.shape[0], n, j, p, dtype.itemsize, block, sizes)
    # Zeros in `x` meet the unused codes of the last byte, and of the last `wgmma`.
    size = -(-j * p // unit_of(block)) * unit_of(block)
    more = padded(x.shape[0]) - x.shape[0]
    x = jnp.pad(x.astype(jnp.bfloat16), ((0, more), (0, size - x.shape[1])))
    if block is None:
        scale = from_bits(stored["scale"], format.scale_dtype)[:, 0]
        scale = jnp.broadcast_to(infinite_as_nan(scale), (n,))
        scaling = [jnp.pad(scale, (0, -n % pieces.channels))]
    else:
        scaling = [_aligned(a) for a in scaling]
    y = product(
        x,
        codes,
        *scaling,
        format=format,
        block=block,
        plan=pieces,
        dtype=dtype if pieces.splits == 1 else jnp.float32,
        interpret=interpret,
    )
    y = y[:, : y.shape[1] - more]
    return y[0] if pieces.splits == 1 else jnp.sum(y, axis=0).astype(dtype)


def _aligned(a):
    # TMA, the unit that copies tiles, needs rows of a multiple of 16 bytes.
    return jnp.pad(a, ((0, 0), (0, -a.shape[1] % (16 // a.dtype.itemsize))))


def refuse(problem: Problem) -> str | None:
    """Why no kernel for Hopper applies to a problem, or `None`."""
    if (reason := hopper()) is not None:
        return reason
    if problem.k == 0 or problem.rows == 0:
        return "is for operands that are not empty"
    if problem.n < 8:
        return f"is for weights of 8 rows or more, got {problem.n}"
    if problem.row_axis != -2:
        return (
            "needs the contracted axis last in memory, where "
            '`eqq.tree_prepack(model, platform="gpu")` puts it'
        )
    if problem.dtype.itemsize > 4:
        return f"computes in float32 at most, got {problem.dtype.name}"
    if problem.rows is None:
        return "needs to know the number of rows when compiling"
    return None


# By the data sheet of an H200: up to this many rows, decoding each tile of the weight
# where it is used takes less time than writing the decoded weight to memory and reading
# it back.
_most_rows = 512


def _supports(problem: Problem) -> str | None:
    if (reason := refuse(problem)) is not None:
        return reason
    format = problem.format
    if isinstance(format, Ternary) and format.radix != 4:
        return (
            "needs codes of 2 bits, as "
            f'`eqq.tree_prepack(model, platform="gpu")` packs them, got {format}'
        )
    rows = problem.rows
    if rows is not None and rows > _most_rows:
        return (
            f"is for at most {_most_rows} rows, got {rows}: for more, "
            "decoding the weight once takes less time"
        )
    p = per_byte(format)
    size = (problem.k + problem.tail) // p
    if size % 32 != 0:
        return f"needs rows of a multiple of 32 bytes, got {size}"
    block, least = format.block_size, 16 * p
    if block is None or block % 256 == 0 or (256 % block == 0 and block >= least):
        return None
    return (
        f"needs blocks whose size is a power of two from {least} to 256, or a multiple "
        f"of 256, got {block}"
    )


_types = (NF4, Int4, Int8, Ternary)
for _type, _activation in it.product(_types, (None, AbstractFormat)):
    register_kernel(
        "matmul",
        _type,
        "cuda",
        activation=_activation,
        priority=1,
        supports=_supports,
        # Inputs are rounded to bfloat16; so are the points of NF4. Small integers are
        # exact.
        error=8e-3 if _type is NF4 else 5e-3,
    )(bfloat16_wgmma)
