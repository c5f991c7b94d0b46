import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Float32, Int8 as Int8Array

from ...formats import from_bits, Int8
from .._finite import infinite_as_nan
from .._problem import Problem
from .._table import register_kernel
from ..native import integer_product
from ._float import refuse
from ._pallas import launch, mosaic_gpu, pipeline, store
from ._plan import group, Plan, splits_of, stages_of, width
from ._rows import by_eights, padded, swizzle_of
from ._seconds import predicted


# Products of 8-bit integers, with one scale for each row of `x` and of the weight.

# The columns of a tile of the product, and the bytes of each row in a pipeline step.
_columns = 128
_bytes = 128

# Up to this many rows, the weight is read from memory about once. With more rows, XLA's
# products read less, since multiprocessors share the data that they load.
_most_rows = 256


def int8_wgmma(
    x: Float[Array, "m k"],
    stored: dict[str, Array],
    problem: Problem,
    interpret: Any = None,
) -> Float[Array, "m n"]:
    """Quantizes `x` to 8 bits, multiplies 8-bit integers by `wgmma`, and applies the
    scales of both to the sums."""
    most = ft.partial(_most, interpret=interpret)
    return by_eights(most, int8_dot, x, stored, problem)


def _most(x, stored, problem, interpret):
    codes, scale = _rounded(x, problem.activation)
    m, n, k = x.shape[0], problem.n, problem.k
    more = padded(m) - m
    factor = jnp.pad(_scale_of_rows(stored, problem), (0, -n % _columns))
    groups = 1 if m <= group else 2
    rows = groups * group
    all_steps = -(-k // _bytes)
    tiles = -(-n // _columns) * -(-m // rows)
    steps = -(-all_steps // splits_of(tiles, all_steps, 8 * min(m, rows) / _bytes))
    splits = -(-all_steps // steps)
    dtype = problem.dtype if splits == 1 else np.dtype(np.float32)
    sums = rows * _columns * dtype.itemsize
    stages = stages_of(steps, (rows + _columns) * _bytes, sums)
    y = _product(
        jnp.pad(codes, ((0, more), (0, 0))),
        stored["codes"],
        jnp.pad(scale, (0, -m % rows)),
        factor,
        plan=Plan(group, groups, _bytes, steps, stages, splits),
        dtype=dtype,
        interpret=interpret,
    )
    y = y[:, :m]
    return y[0] if splits == 1 else jnp.sum(y, axis=0).astype(problem.dtype)


def _rounded(x, activation):
    stored = activation.encode(x.astype(jnp.float32))
    return stored["codes"], activation.scales(stored, 0)[:, 0]


def _scale_of_rows(stored, problem):
    scale = from_bits(stored["scale"], problem.format.scale_dtype)
    return jnp.broadcast_to(infinite_as_nan(scale.reshape(-1)), (problem.n,))


def _product(
    x: Int8Array[Array, "m k"],
    w: Int8Array[Array, "n k"],
    scale_of_x: Float32[Array, " m_"],
    scale_of_w: Float32[Array, " n_"],
    *,
    plan: Plan,
    dtype: Any,
    interpret: Any,
) -> Float[Array, "s m n"]:
    pl, plgpu = mosaic_gpu()
    m, n = x.shape[0], w.shape[0]
    # `wgmma` reads both operands from shared memory, in tiles of 8 rows whose bytes TMA
    # has swizzled to avoid bank conflicts.
    size = swizzle_of(x.shape[1], _bytes)
    swizzled = (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(size))

    def kernel(x_gmem, w_gmem, scale_x, scale_w, y_gmem, y_smem):
        axis = lax.axis_index
        # A program computes `plan.channels` rows and `_columns` columns of `y`, for one
        # part "k" of the contracted axis. Each warpgroup takes `group` of the rows.
        wg, first = axis("wg"), axis("k") * plan.steps
        at = axis("m") * plan.channels + wg * group
        mine, columns = pl.ds(at, group), pl.ds(axis("n") * _columns, _columns)

        def body(index, x_smem, w_smem, sums):
            plgpu.wgmma(sums, x_smem.at[pl.ds(wg * group, group)], w_smem.T)
            # The step's shared memory is overwritten once the body returns.
            plgpu.wgmma_wait(0)
            return sums

        def factor(scales, part, axis):
            # Loads one scale per row (`axis` 0) or column (1) into the registers of the
            # threads that hold the sums of that row or column.
            layout = plgpu.Layout.WGMMA.reduce(1 - axis)
            loaded = plgpu.load(scales.at[part], layout=layout, optimized=False)
            return lax.broadcast_in_dim(loaded, (group, _columns), [axis])

        def compute(run):
            def scope(sums):
                y = run(sums)[...].astype(jnp.float32)
                y = y * factor(scale_x, mine, 0) * factor(scale_w, columns, 1)
                store(y_smem.at[wg], y.astype(dtype))
                plgpu.commit_smem()
                to = y_gmem.at[axis("k"), mine, columns]
                plgpu.copy_smem_to_gmem(y_smem.at[wg], to)
                plgpu.wait_smem_to_gmem(0)

            pl.run_scoped(scope, plgpu.ACC((group, _columns), jnp.int32))

        def tile(name, rows):
            index = lambda k: (axis(name), first + k)
            return plgpu.BlockSpec((rows, _bytes), index, transforms=swizzled)

        specs = [tile("m", plan.channels), tile("n", _columns)]
        pipeline(body, compute, plan, specs)(x_gmem, w_gmem)

    y = launch(
        kernel,
        plan,
        jax.ShapeDtypeStruct((plan.splits, m, width(n, _columns)), dtype),
        (-(-n // _columns), -(-m // plan.channels)),
        [plgpu.SMEM((plan.groups, group, _columns), dtype)],
        interpret,
    )(x, w, scale_of_x, scale_of_w)
    return y[:, :, :n]


def int8_dot(
    x: Float[Array, "m k"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m n"]:
    """Quantizes `x` to 8 bits, and leaves the product of 8-bit integers to XLA."""
    codes, scale = _rounded(x, problem.activation)
    y = integer_product(codes, stored["codes"], across=problem.row_axis != -2)
    y = y * scale[:, None]
    return (y * _scale_of_rows(stored, problem)[None]).astype(problem.dtype)


def _of_channels(problem: Problem) -> str | None:
    for format in (problem.format, problem.activation):
        if format is not None and format.block_size is not None:
            return f"needs one scale per row of both operands, got {format}"
    if problem.dtype.itemsize > 4:
        return f"supports dtypes up to float32, got {problem.dtype.name}"
    return None


def _supports(problem: Problem) -> str | None:
    if (reason := _of_channels(problem) or refuse(problem)) is not None:
        return reason
    if problem.k % 32 != 0:
        return f"needs rows whose size is a multiple of 32 bytes, got {problem.k}"
    rows = problem.rows
    if rows is not None and rows > _most_rows:
        return (
            f"is for at most {_most_rows} rows, got {rows}: for more, XLA's "
            "integer products read less memory"
        )
    return None


_register = ft.partial(
    register_kernel, "matmul", Int8, "cuda", activation=Int8, any_length=True
)
_register(supports=_supports, seconds=predicted(0, 0.8))(int8_wgmma)
_register(supports=_of_channels, seconds=predicted(0.1, 0.8))(int8_dot)
