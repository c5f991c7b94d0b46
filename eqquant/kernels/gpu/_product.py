from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, BFloat16, Float, Integer, Shaped

from .._finite import infinite_as_nan
from ._pallas import launch, mosaic_gpu, pipeline, store
from ._plan import group, loaded, Plan, width
from ._rows import swizzle_of
from ._words import in_order_of_words, in_registers, interpreted, Points


# The number of registers per thread for sums that wait for their scales.
_waiting = 16


def unit_of(block: int | None) -> int:
    """The number of codes per row in a call of `wgmma`, all of the same block."""
    return next(u for u in (64, 32, 16) if block is None or block % u == 0)


def product(
    x: BFloat16[Array, "m k"],
    codes: Integer[Array, "n j"],
    scale: Shaped[Array, "..."],
    offset: Integer[Array, "n _"] | None = None,
    *,
    points: Points,
    kind: Literal["zero_point", "minimum"] | None,
    scale_dtype: Any,
    block: int | None,
    plan: Plan,
    dtype: Any,
    interpret: Any,
) -> Float[Array, "s m n"]:
    """Computes `x @ w.T` for a weight with the contracted axis last. Returns the
    partial sum of each part of the contracted axis, rounded to `dtype`.

    `scale` and `offset` have an entry for each `block` codes, as stored. If `block` is
    `None`, `scale` has a float for each row, padded to whole tiles.

    `kind` is the kind of the offset. With few rows, scales are applied to the sums of
    each block. With many rows, or with minima, they are applied to the decoded numbers.

    `wgmma` can read only its left operand from registers. So each tile computes
    `w @ x.T`, with the decoded weight on the left, and stores the transpose.
    """
    pl, plgpu = mosaic_gpu()
    m, n = x.shape[0], codes.shape[0]
    p, unit = points.per_byte, unit_of(block)
    step = plan.bytes * p
    scaling = [] if block is None else [a for a in (scale, offset) if a is not None]
    # A step has this many blocks (1 if a block is longer than a step), and copies this
    # many scales and zero-points. Each block takes `number` calls of `wgmma`.
    blocks = 1 if block is None else max(1, step // block)
    sizes = [loaded(step, block, a.dtype.itemsize) for a in scaling]
    number = step // unit // blocks

    operands = [codes, *(scaling if scaling else [scale])]
    number_of_refs = len(operands) + 2
    row = plgpu.Layout.WGMMA.reduce(1)
    # The layout in which `wgmma` leaves sums, but of single numbers instead of pairs,
    # so that they can be transposed.
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
        # A program computes `plan.channels` columns and `plan.rows` rows of `y`, for
        # one part "k" of the contracted axis. Each warpgroup takes `group` columns.
        wg, first = axis("wg"), axis("k") * plan.steps
        mine = pl.ds(wg * group, group)

        def decode(codes_smem):
            # In this layout, a thread loads words of 4 bytes: see `_words.py`.
            layout = plgpu.Layout.WGMMA_UPCAST_2X
            codes = plgpu.load(codes_smem.at[mine], layout=layout)
            return (interpreted if interpret else in_registers)(codes, points, unit)

        def multiply(sums, parts, x_smem, start):
            for i, part in enumerate(parts):
                columns = x_smem.at[:, pl.ds((start + i) * unit, unit)]
                if interpret:
                    # The interpreter has no operands in registers: stage them in
                    # shared memory.
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

        def loader(index, blocks_smem):
            # Returns a function that loads the scale (`i` is 0) or the offset (1) of
            # each row, in float32, for the block `b` of the step.
            def load(i, b):
                at = lax.rem((first + index[0]) * step // block + b, sizes[i])
                ref = blocks_smem[i].at[mine, at]
                found = plgpu.load(ref, layout=row, optimized=False)
                if i == 0 or kind == "minimum":
                    found = lax.bitcast_convert_type(found, scale_dtype)
                return found.astype(jnp.float32)

            return load

        def spread(of_rows, dtype):
            return lax.broadcast_in_dim(of_rows.astype(dtype), (group, unit), [0])

        def less_zero_points(parts, load):
            # Both are small integers, so that their difference is exact.
            if kind != "zero_point":
                return parts
            zeros = [load(1, b) + points.excess for b in range(blocks)]
            zeros = [spread(zero, jnp.bfloat16) for zero in zeros]
            return [part - zeros[i // number] for i, part in enumerate(parts)]

        def body_of_sums(index, x_smem, codes_smem, *rest):
            *blocks_smem, y = rest
            load = loader(index, blocks_smem)
            parts = less_zero_points(decode(codes_smem), load)
            # Several blocks, each with accumulators of its own, are in flight at once;
            # then each block's sums are scaled and added to `y`.
            together = max(1, min(blocks, 2 * _waiting // plan.rows))
            for start in range(0, blocks, together):
                some = range(start, start + together)
                scales = [load(0, b) for b in some]

                def multiply_blocks(*sums):
                    for b, total in zip(some, sums):
                        at = b * number
                        multiply(total, parts[at : at + number], x_smem, at)
                    return [total[...] for total in sums]

                found = pl.run_scoped(multiply_blocks, *[sums_type] * together)
                for total, scale in zip(found, scales):
                    scale = infinite_as_nan(scale)
                    y = y + total * lax.broadcast_in_dim(scale, total.shape, [0])
            return y

        def body_of_numbers(index, x_smem, codes_smem, *rest):
            *blocks_smem, sums = rest
            load = loader(index, blocks_smem)
            parts = less_zero_points(decode(codes_smem), load)
            dtype = jnp.float32 if kind == "minimum" else jnp.bfloat16
            for b in range(blocks):
                scale = spread(load(0, b), dtype)
                low = spread(load(1, b), dtype) if kind == "minimum" else None
                for i in range(b * number, (b + 1) * number):
                    if low is None:
                        parts[i] = parts[i] * scale
                        continue
                    point = (parts[i] - jnp.bfloat16(points.excess)).astype(dtype)
                    parts[i] = (point * scale + low).astype(jnp.bfloat16)
            multiply(sums, parts, x_smem, 0)
            plgpu.wgmma_wait(0)
            return sums

        def scaled(y):
            mine = pl.ds(axis("n") * plan.channels + wg * group, group)
            factor = plgpu.load(weight_gmem[1].at[mine], layout=row, optimized=False)
            return y * lax.broadcast_in_dim(factor, y.shape, [0])

        def put(y):
            # Transposes while storing to shared memory, from which TMA copies.
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
            elif plan.scales_numbers:
                pl.run_scoped(lambda sums: put(run(sums)[...]), sums_type)
            else:
                y = jnp.zeros((group, plan.rows), jnp.float32)
                put(run(plgpu.layout_cast(y, plgpu.Layout.WGMMA)))

        def blocks_spec(number):
            def index(k):
                return axis("n"), (first + k) * step // block // number

            return plgpu.BlockSpec((plan.channels, number), index)

        specs = [
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
        ]
        if block is None:
            body = body_of_channels
        else:
            body = body_of_numbers if plan.scales_numbers else body_of_sums
        run = pipeline(body, compute, plan, specs)
        run(x_gmem, *weight_gmem[: 1 + len(scaling)])

    scratch = [plgpu.SMEM((plan.groups, plan.rows, group), dtype)]
    if interpret:
        shape, transforms = (plan.groups, group, unit), swizzled(2 * unit, 2)
        scratch.append(plgpu.SMEM(shape, jnp.bfloat16, transforms=transforms))
    y = launch(
        kernel,
        plan,
        jax.ShapeDtypeStruct((plan.splits, m, width(n, group)), dtype),
        (-(-n // plan.channels), -(-m // plan.rows)),
        scratch,
        interpret,
    )(in_order_of_words(x, p, unit), *operands)
    return y[:, :, :n]
