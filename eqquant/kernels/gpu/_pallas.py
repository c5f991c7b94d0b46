from collections.abc import Callable, Sequence
from typing import Any

import jax

from ._plan import copying_registers, Plan


def mosaic_gpu() -> tuple[Any, Any]:
    """Imports Pallas and its GPU backend, which takes most of a second. (Their types
    are `Any` since their interfaces change between versions of JAX.)"""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return pl, plgpu


def pipeline(
    body: Callable[..., Any],
    compute: Callable[..., None],
    plan: Plan,
    specs: Sequence[Any],
) -> Callable[..., None]:
    """Returns the warp-specialized pipeline of a kernel. One warpgroup copies the tiles
    of the next steps from global to shared memory, while `plan.groups` other warpgroups
    run `body` on the tiles that have arrived. `compute` sets up their accumulators."""
    _, plgpu = mosaic_gpu()
    return plgpu.emit_pipeline_warp_specialized(
        body,
        grid=(plan.steps,),
        # Copying needs few registers: leave the others to the compute warpgroups.
        memory_registers=copying_registers,
        wg_axis="wg",
        num_compute_wgs=plan.groups,
        max_concurrent_steps=plan.stages,
        compute_context=compute,
        in_specs=specs,
    )


def launch(
    kernel: Callable[..., None],
    plan: Plan,
    out: jax.ShapeDtypeStruct,
    tiles: tuple[int, int],
    scratch: Sequence[Any],
    interpret: Any,
) -> Callable[..., Any]:
    """Runs a kernel for each part `k` of the contracted axis and each of the `n` by `m`
    tiles of the product."""
    _, plgpu = mosaic_gpu()
    return plgpu.kernel(
        kernel,
        out_type=out,
        grid=(plan.splits, *tiles),
        grid_names=("k", "n", "m"),
        num_threads=plan.groups + 1,
        thread_name="wg",
        scratch_types=scratch,
        interpret=interpret,
        # The kernels state the layouts of registers, which warpgroup semantics would
        # infer.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane
        ),
    )


def store(ref: Any, y: Any) -> None:
    """Writes registers to memory, even in layouts for which Mosaic has no optimized
    store."""
    _, plgpu = mosaic_gpu()
    if jax.__version_info__ >= (0, 12):
        plgpu.store(ref, y, optimized=False)
    else:
        ref[...] = y
