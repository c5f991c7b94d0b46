from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer, Shaped

from ...formats import AbstractGrid, AbstractScaled, from_bits, Stored, Ternary
from .._problem import Problem
from ._tuning import largest_block, memory


class Operand(NamedTuple):
    """An operand of a kernel: an array, the shape of its tile, and which tile a step of
    the grid takes."""

    array: Array
    tile: tuple[int, ...]
    index: Callable[..., tuple[Any, ...]]


def accumulate(
    step: Callable[..., None],
    finish: Callable[..., Array],
    operands: Sequence[Operand],
    grid: tuple[int, int, int],
    total: tuple[int, int],
    out: jax.ShapeDtypeStruct,
    tile: tuple[int, int],
    problem: Problem,
) -> Array:
    """Calls `step(i, total, *operands)` for each `i` of the last axis of the grid, and
    writes `finish(total, *operands)` as a tile of the result, which is where the other
    two axes say. `total` has zeros at first, and a shape of its own."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import tpu as pltpu

    def kernel(*refs):
        *inputs, y, sums = refs
        i = pl.program_id(2)

        @pl.when(i == 0)
        def _():
            sums[...] = jnp.zeros_like(sums)

        step(i, sums, *inputs)

        @pl.when(i == grid[2] - 1)
        def _():
            y[...] = finish(sums[...], *inputs).astype(y.dtype)

    # What varies over the shards of a mesh makes the result do so.
    kind = jax.typeof(operands[0].array).manual_axis_type
    if kind.varying:
        out = jax.ShapeDtypeStruct(out.shape, out.dtype, manual_axis_type=kind)
    # (Pallas's interpreter does not map over kernels that say which axes are parallel.)
    axes = ("parallel", "parallel", "arbitrary") if problem.stack == 1 else None
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=[pl.BlockSpec(operand.tile, operand.index) for operand in operands],
        out_specs=pl.BlockSpec(tile, lambda i, j, step: (i, j)),
        out_shape=out,
        scratch_shapes=[pltpu.VMEM(total, jnp.float32)],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=axes, vmem_limit_bytes=memory
        ),
    )(*[operand.array for operand in operands])


def scales(stored: Stored, problem: Problem) -> Float[Array, "g n"]:
    """The scale of each block of each row."""
    assert isinstance(problem.format, AbstractScaled)
    scale = from_bits(stored["scale"], problem.format.scale_dtype)
    return jnp.broadcast_to(scale, (scale.shape[0], problem.n))


def inside(
    a: Float[Array, "g n"], axis: int, start: Integer[Array, ""], size: int
) -> Float[Array, "g n"]:
    """Makes zeros of what a tile has beyond the end of an array: that may be anything.
    The tile begins at `start`, and the array has so large a `size`."""
    if size % a.shape[axis] == 0:
        return a
    index = start + lax.broadcasted_iota(jnp.int32, a.shape, axis)
    return jnp.where(index < size, a, np.float32(0))


def padded(x: Shaped[Array, "m k"], m: int, k: int) -> Shaped[Array, "_ _"]:
    """Zeros after the last row and column, up to the next multiple of `m` and `k`."""
    rows, columns = x.shape
    return jnp.pad(x, ((0, -rows % m), (0, -columns % k)))


def bytes_of(problem: Problem, number: int) -> int:
    """How many bytes so many codes are."""
    return round(number * problem.format.bits / 8)


def out_dtype(problem: Problem) -> Any:
    """What a kernel writes."""
    return jnp.bfloat16 if problem.dtype == jnp.bfloat16 else jnp.float32


def refuse(problem: Problem) -> str | None:
    """The reasons that all kernels have."""
    if problem.rows is None:
        return "needs to know the number of rows when compiling"
    if problem.rows == 0 or problem.n == 0 or problem.k == 0:
        return "is for operands that are not empty"
    if problem.dtype.itemsize > 4:
        return f"computes in float32, got {problem.dtype.name}"
    prepack = "`eqquant.tree_prepack(model, platform='tpu')`"
    if isinstance(problem.format, Ternary) and problem.format.radix == 3:
        return f"needs 2 bits for a code, which {prepack} gives it"
    if problem.row_axis != -1:
        return f"needs the contracted axis first in memory, where {prepack} puts it"
    size = problem.format.block_size
    if size is not None and size > largest_block:
        return f"is for blocks of at most {largest_block} numbers, got {size}"
    return None


def refuse_lookup(problem: Problem) -> str | None:
    """The reasons that kernels have which look codes up."""
    assert isinstance(problem.format, AbstractGrid)
    if problem.format.radix != 16:
        return f"is for codes of 4 bits, got {problem.format}"
    return refuse(problem)
