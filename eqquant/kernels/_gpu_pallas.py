from typing import Any

import jax


def mosaic_gpu() -> tuple[Any, Any]:
    """Pallas, and its part for GPUs. They change too often to be typed, and take most
    of a second to import."""
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return pl, plgpu


def store(ref: Any, y: Any) -> None:
    """Writes to memory, in whatever order the numbers lie."""
    _, plgpu = mosaic_gpu()
    if jax.__version_info__ >= (0, 12):
        plgpu.store(ref, y, optimized=False)
    else:
        ref[...] = y
