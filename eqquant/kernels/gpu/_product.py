from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Integer, Shaped

from ...formats import AbstractScaled
from .._finite import infinite_as_nan
from ._pallas import mosaic_gpu, store
from ._plan import aligned, group, loaded, Plan
from ._rows import swizzle_of
from ._words import in_order_of_words, in_registers, interpreted, per_byte


# How many registers of each thread may hold sums that wait for their scales.
_waiting = 16


def unit_of(block: int | None) -> int:
    """How many codes a call of `wgmma` takes, all of one block."""
    return 64 if block is None or block % 64 == 0 else 32


def product(
    x: BFloat16[Array, "m k"],
    codes: Integer[Array, "n j"],
    scale: Shaped[Array, "..."],
    zero_point: Integer[Array, "n _"] | None = None,
    *,
    format: AbstractScaled,
    block: int | None,
    plan: Plan,
    dtype: Any,
    interpret: Any,
) -> Float[Array, "s m n"]:
    """`x @ w.T` for a weight that lies in rows: for each part of the contracted axis,
    the sum, rounded to `dtype` in the end.

    `scale` and `zero_point` are of each `block` codes, as stored. Or if that is `None`,
    `scale` is of each row, as floats, and some more for what the last piece has less.

    A piece of the product is transposed, so that the weight is the operand that `wgmma`
    takes from registers. One warpgroup brings what the others compute with.
    """
    pl, plgpu = mosaic_gpu()
    m, n = x.shape[0], codes.shape[0]
    p, unit = per_byte(format), unit_of(block)
    step = plan.bytes * p
    of_blocks = (
        [] if block is None else [a for a in (scale, zero_point) if a is not None]
    )
    # Blocks in a step, or 1 if a block is longer; and in what comes with it.
    blocks = 1 if block is None else max(1, step // block)
    sizes = [loaded(step, block, a.dtype.itemsize) for a in of_blocks]
    number = step // unit // blocks

    operands = [codes, *(of_blocks if of_blocks else [scale])]
    number_of_refs = len(operands) + 2
    row = plgpu.Layout.WGMMA.reduce(1)
    # As `wgmma` leaves sums, but one at a time instead of in pairs: to be transposed.
    single = plgpu.Layout.TILED(
        plgpu.Tiling(((64, 8), (16, 8), (8, 8), (2,), (1,))),
        warp_dims=(-8,),
        lane_dims=(-4, -3),
        vector_dim=-1,
    )
    sums_type = plgpu.ACC((group, plan.rows), jnp.float32)

    def swizzled(nbytes, itemsize):
        tiling = plgpu.TilingTransform((8, nbytes // itemsize))
        return tiling, plgpu.SwizzleTransform(nbytes)

    def kernel(x_gmem, *refs):
        *weight_gmem, y_gmem, y_smem = refs[:number_of_refs]
        staged = refs[number_of_refs:]
        axis = lax.axis_index
        wg, first = axis("wg"), axis("k") * plan.steps
        mine = pl.ds(wg * group, group)

        def decode(codes_smem):
            layout = plgpu.Layout.WGMMA_UPCAST_2X
            codes = plgpu.load(codes_smem.at[mine], layout=layout)
            return (interpreted if interpret else in_registers)(codes, format, unit)

        def multiply(sums, parts, x_smem, start):
            for i, part in enumerate(parts):
                columns = x_smem.at[:, pl.ds((start + i) * unit, unit)]
                if interpret:
                    # Which has no operands in registers.
                    staged[0].at[wg][...] = part
                    plgpu.commit_smem()
                    plgpu.wgmma(sums, staged[0].at[wg], columns.T)
                    plgpu.wgmma_wait(0)
                else:
                    plgpu.wgmma(sums, part, columns.T)

        def body_of_channels(index, x_smem, codes_smem, sums):
            multiply(sums, decode(codes_smem), x_smem, 0)
            plgpu.wgmma_wait(0)
            return sums

        def body_of_blocks(index, x_smem, codes_smem, *rest):
            *blocks_smem, y = rest
            parts = decode(codes_smem)

            def of_block(i, b):
                at = lax.rem((first + index[0]) * step // block + b, sizes[i])
                return plgpu.load(
                    blocks_smem[i].at[mine, at], layout=row, optimized=False
                )

            if zero_point is not None:
                for b in range(blocks):
                    zero = of_block(1, b).astype(jnp.float32) + 128
                    zero = zero.astype(jnp.bfloat16)
                    zero = lax.broadcast_in_dim(zero, (group, unit), [0])
                    for i in range(b * number, (b + 1) * number):
                        parts[i] = parts[i] - zero
            together = max(1, min(blocks, 2 * _waiting // plan.rows))
            for start in range(0, blocks, together):
                some = range(start, start + together)
                scales = [
                    lax.bitcast_convert_type(of_block(0, b), format.scale_dtype)
                    for b in some
                ]

                def multiply_blocks(*sums):
                    for b, total in zip(some, sums):
                        at = b * number
                        multiply(total, parts[at : at + number], x_smem, at)
                    return [total[...] for total in sums]

                found = pl.run_scoped(multiply_blocks, *[sums_type] * together)
                for total, factor in zip(found, scales):
                    factor = infinite_as_nan(factor.astype(jnp.float32))
                    y = y + total * lax.broadcast_in_dim(factor, total.shape, [0])
            return y

        def scaled(y):
            mine = pl.ds(axis("n") * plan.channels + wg * group, group)
            factor = plgpu.load(weight_gmem[1].at[mine], layout=row, optimized=False)
            return y * lax.broadcast_in_dim(factor, y.shape, [0])

        def put(y):
            y = plgpu.layout_cast(y.astype(dtype), single)
            store(y_smem.at[wg].T, y)
            plgpu.commit_smem()
            rows = pl.ds(axis("m") * plan.rows, plan.rows)
            columns = pl.ds(axis("n") * plan.channels + wg * group, group)
            plgpu.copy_smem_to_gmem(y_smem.at[wg], y_gmem.at[axis("k"), rows, columns])
            plgpu.wait_smem_to_gmem(0)

        def compute(run):
            if block is None:
                pl.run_scoped(lambda sums: put(scaled(run(sums)[...])), sums_type)
            else:
                y = jnp.zeros((group, plan.rows), jnp.float32)
                put(run(plgpu.layout_cast(y, plgpu.Layout.WGMMA)))

        def blocks_spec(number):
            def index(k):
                return axis("n"), (first + k) * step // block // number

            return plgpu.BlockSpec((plan.channels, number), index)

        plgpu.emit_pipeline_warp_specialized(
            body_of_channels if block is None else body_of_blocks,
            grid=(plan.steps,),
            memory_registers=40,
            wg_axis="wg",
            num_compute_wgs=plan.groups,
            max_concurrent_steps=plan.stages,
            compute_context=compute,
            in_specs=[
                plgpu.BlockSpec(
                    (plan.rows, step),
                    lambda k: (axis("m"), first + k),
                    transforms=swizzled(2 * unit, 2),
                ),
                plgpu.BlockSpec(
                    (plan.channels, plan.bytes),
                    lambda k: (axis("n"), first + k),
                    transforms=swizzled(swizzle_of(codes.shape[1], plan.bytes), 1),
                ),
                *map(blocks_spec, sizes),
            ],
        )(x_gmem, *weight_gmem[: 1 + len(of_blocks)])

    scratch = [plgpu.SMEM((plan.groups, plan.rows, group), dtype)]
    if interpret:
        shape, transforms = (plan.groups, group, unit), swizzled(2 * unit, 2)
        scratch.append(plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms))
    y = plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((plan.splits, m, aligned(n)), dtype),
        grid=(plan.splits, -(-n // plan.channels), -(-m // plan.rows)),
        grid_names=("k", "n", "m"),
        num_threads=plan.groups + 1,
        thread_name="wg",
        scratch_types=scratch,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )(in_order_of_words(x, p, unit), *operands)
    return y[:, :, :n]
