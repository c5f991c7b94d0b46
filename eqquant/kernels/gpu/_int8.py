import functools as ft
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import sequential_vmap
from jaxtyping import Array, Float, Float32, Int8 as Int8Array

from ...formats import from_bits, Int8
from .._finite import infinite_as_nan
from .._problem import Problem
from .._table import register_kernel
from ._float import refuse
from ._pallas import mosaic_gpu, store
from ._plan import aligned, group, Plan, splits_of, stages_of
from ._rows import by_eights, padded, swizzle_of


# Products of 8-bit integers, with a scale for each row of both operands.

# Columns of the product, in a piece; and bytes of each row, in a step.
_columns = 128
_bytes = 128

# Up to this many rows the weight is read about once; for more, XLA has products that
# share what they read between multiprocessors.
_most_rows = 256


def int8_wgmma(
    x: Float[Array, "m k"],
    stored: dict[str, Array],
    problem: Problem,
    interpret: Any = None,
) -> Float[Array, "m n"]:
    """Rounds `x` to 8 bits, and multiplies integers."""

    @sequential_vmap
    def one(x, stored):
        most = ft.partial(_most, interpret=interpret)
        return by_eights(most, int8_dot, x, stored, problem)

    return one(x, stored)


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
    size = swizzle_of(x.shape[1], _bytes)
    swizzled = (plgpu.TilingTransform((8, size)), plgpu.SwizzleTransform(size))

    def kernel(x_gmem, w_gmem, scale_x, scale_w, y_gmem, y_smem):
        axis = lax.axis_index
        wg, first = axis("wg"), axis("k") * plan.steps
        at = axis("m") * plan.channels + wg * group
        mine, columns = pl.ds(at, group), pl.ds(axis("n") * _columns, _columns)

        def body(index, x_smem, w_smem, sums):
            plgpu.wgmma(sums, x_smem.at[pl.ds(wg * group, group)], w_smem.T)
            plgpu.wgmma_wait(0)
            return sums

        def factor(scales, part, axis):
            layout = plgpu.Layout.WGMMA.reduce(1 - axis)
            found = plgpu.load(scales.at[part], layout=layout, optimized=False)
            return lax.broadcast_in_dim(found, (group, _columns), [axis])

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

        plgpu.emit_pipeline_warp_specialized(
            body,
            grid=(plan.steps,),
            memory_registers=40,
            wg_axis="wg",
            num_compute_wgs=plan.groups,
            max_concurrent_steps=plan.stages,
            compute_context=compute,
            in_specs=[
                plgpu.BlockSpec(
                    (plan.channels, _bytes),
                    lambda k: (axis("m"), first + k),
                    transforms=swizzled,
                ),
                plgpu.BlockSpec(
                    (_columns, _bytes),
                    lambda k: (axis("n"), first + k),
                    transforms=swizzled,
                ),
            ],
        )(x_gmem, w_gmem)

    y = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.splits, m, aligned(n)), dtype),
        grid=(plan.splits, -(-n // _columns), -(-m // plan.channels)),
        grid_names=("k", "n", "m"),
        num_threads=plan.groups + 1,
        thread_name="wg",
        scratch_types=[plgpu.SMEM((plan.groups, group, _columns), dtype)],
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(x, w, scale_of_x, scale_of_w)
    return y[:, :, :n]


def int8_dot(
    x: Float[Array, "m k"], stored: dict[str, Array], problem: Problem
) -> Float[Array, "m n"]:
    """Rounds `x` to 8 bits, and leaves the product of integers to XLA."""
    codes, scale = _rounded(x, problem.activation)
    axis = 1 if problem.row_axis == -2 else 0
    y = lax.dot_general(
        codes,
        stored["codes"],
        (((1,), (axis,)), ((), ())),
        preferred_element_type=jnp.int32,
    )
    y = y.astype(jnp.float32) * scale[:, None]
    return (y * _scale_of_rows(stored, problem)[None]).astype(problem.dtype)


def _of_channels(problem: Problem) -> str | None:
    for format in (problem.format, problem.activation):
        if format is not None and format.block_size is not None:
            return f"needs one scale for each row of both operands, got {format}"
    if problem.dtype.itemsize > 4:
        return f"computes in float32, got {problem.dtype.name}"
    return None


def _supports(problem: Problem) -> str | None:
    if (reason := _of_channels(problem) or refuse(problem)) is not None:
        return reason
    if problem.k % 32 != 0:
        return f"needs rows of a multiple of 32 bytes, got {problem.k}"
    rows = problem.rows
    if rows is not None and rows > _most_rows:
        return (
            f"is for at most {_most_rows} rows, got {rows}: for more, XLA's "
            "products of integers read less"
        )
    return None


register_kernel(
    "matmul", Int8, "cuda", activation=Int8, priority=2, supports=_supports, error=1e-5
)(int8_wgmma)
register_kernel(
    "matmul",
    Int8,
    "cuda",
    activation=Int8,
    priority=1,
    supports=_of_channels,
    error=1e-5,
)(int8_dot)
