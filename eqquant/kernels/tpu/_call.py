from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ...formats import AbstractGrid, AbstractScaled, from_bits, Stored, Ternary
from .._problem import Problem
from ._tuning import largest_block, memory, Tile


class Operand(NamedTuple):
    """An operand of a kernel: an array, the shape of its tiles, and the index of the
    tile that a step of the grid loads."""

    array: Array
    tile: tuple[int, ...]
    index: Callable[..., tuple[Any, ...]]


def accumulate(
    step: Callable[..., None],
    finish: Callable[..., Array],
    operands: Sequence[Operand],
    steps: int,
    shape: tuple[int, int],
    tile: tuple[int, int],
    problem: Problem,
    sums: tuple[int, int] | None = None,
) -> Array:
    """Computes an array of this `shape` by its tiles. For each tile it calls
    `step(i, sums, *operands)` for each `i` below `steps`, and writes
    `finish(sums, *operands)`.

    `sums` are floats on the chip, initially zero, of the shape of the tile or of
    another one. The grid is (tile of rows, tile of columns, step), in this order: its
    last axis runs fastest, so that `sums` belongs to one tile at a time.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(*refs):
        *inputs, y, sums = refs
        i = pl.program_id(2)

        @pl.when(i == 0)
        def _():
            sums[...] = jnp.zeros_like(sums)

        step(i, sums, *inputs)

        @pl.when(i == steps - 1)
        def _():
            y[...] = finish(sums[...], *inputs).astype(y.dtype)

    # Inside `shard_map`, the result varies over the same mesh axes as `x`.
    kind = jax.typeof(operands[0].array).manual_axis_type
    varying = {"manual_axis_type": kind} if kind.varying else {}
    dtype = jnp.bfloat16 if problem.dtype == jnp.bfloat16 else jnp.float32
    # (Pallas's interpreter cannot vmap kernels that declare parallel axes.)
    axes = ("parallel", "parallel", "arbitrary") if problem.stack == 1 else None
    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(shape[0], tile[0]), pl.cdiv(shape[1], tile[1]), steps),
        in_specs=[pl.BlockSpec(operand.tile, operand.index) for operand in operands],
        out_specs=pl.BlockSpec(tile, lambda i, j, step: (i, j)),
        out_shape=jax.ShapeDtypeStruct(shape, dtype, **varying),
        scratch_shapes=[pltpu.VMEM(sums or tile, jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=axes, vmem_limit_bytes=memory
        ),
    )(*[operand.array for operand in operands])


def weight_operands(
    stored: Stored, problem: Problem, tile: Tile, *, transposed: bool = False
) -> list[Operand]:
    """Returns the operands of a weight: its codes, its scales and, if it has them, its
    zero-points. The steps of the grid go along the contracted axis `k`, or along the
    rows if `transposed`. Without blocks, the scales belong to whole rows."""
    block = problem.format.block_size

    def at(i, j, step):
        del i
        return (j, step) if transposed else (step, j)

    def of_block(i, j, step):
        k, n = at(i, j, step)
        return (k if block else 0, n)

    arrays = [scales(stored, problem)]
    if "zero_point" in stored:
        arrays.append(stored["zero_point"])
    groups = blocks_in(tile, problem)
    codes = Operand(stored["codes"], (bytes_of(problem, tile.k), tile.n), at)
    return [codes, *[Operand(a, (groups, tile.n), of_block) for a in arrays]]


def scales(stored: Stored, problem: Problem) -> Float[Array, "g n"]:
    """Returns the scale of each block of each row."""
    assert isinstance(problem.format, AbstractScaled)
    scale = from_bits(stored["scale"], problem.format.scale_dtype)
    return jnp.broadcast_to(scale, (scale.shape[0], problem.n))


def blocks_in(tile: Tile, problem: Problem) -> int:
    """Returns the number of scales for each row of a tile."""
    block = problem.format.block_size
    return 1 if block is None else tile.k // block


def inside(
    a: Float[Array, "g n"], axis: int, start: Integer[Array, ""], size: int
) -> Float[Array, "g n"]:
    """Sets to zero the values of a tile, which begins at `start`, beyond the end of an
    array of this `size`: they are undefined."""
    if size % a.shape[axis] == 0:
        return a
    index = start + lax.broadcasted_iota(jnp.int32, a.shape, axis)
    return jnp.where(index < size, a, np.float32(0))


def padded(x: Shaped[Array, "m k"], m: int, k: int) -> Shaped[Array, "_ _"]:
    """Pads with zeros to a multiple of `m` rows and `k` columns."""
    rows, columns = x.shape
    return jnp.pad(x, ((0, -rows % m), (0, -columns % k)))


def bytes_of(problem: Problem, number: int) -> int:
    """Returns the number of bytes that this number of codes takes."""
    return round(number * problem.format.bits / 8)


def refuse(problem: Problem) -> str | None:
    """Returns why no kernel for TPUs applies to a problem, or `None`."""
    if problem.rows is None:
        return "needs a static number of rows"
    if problem.empty:
        return "needs non-empty operands"
    if problem.dtype.itemsize > 4:
        return f"computes in float32, got {problem.dtype.name}"
    prepack = "`eqquant.tree_prepack(model, platform='tpu')`"
    if isinstance(problem.format, Ternary) and problem.format.radix == 3:
        return f"needs codes of 2 bits, as {prepack} packs them"
    if problem.row_axis != -1 and problem.format.row_axis != -1:
        return f"needs a format with the contracted axis first, got {problem.format}"
    if problem.row_axis != -1:
        return f"needs the contracted axis first in memory, where {prepack} puts it"
    size = problem.format.block_size
    if size is not None and size > largest_block:
        return f"is for blocks of at most {largest_block} numbers, got {size}"
    return None


def refuse_lookup(problem: Problem) -> str | None:
    """Returns why no kernel that looks codes up applies to a problem, or `None`."""
    format = problem.format
    assert isinstance(format, AbstractGrid)
    if format.radix != 16:
        return f"is for codes of 4 bits, got {format}"
    if format.offset is not None or format.ordered:
        return f"is for formats with scales only, got {format}"
    return refuse(problem)
