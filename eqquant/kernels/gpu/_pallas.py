import re
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


def hopper() -> str | None:
    """`None` if kernels for Hopper can be compiled, or a sentence that says why not.

    The device is that of the mesh in whose context a program is traced, if it names
    one, or else the first GPU of this process. A program that is made where there is
    none, to be run elsewhere, is taken to be for Hopper.
    """
    if jax.__version_info__ < (0, 11, 2):
        return f"needs JAX 0.11.2 or newer, got {jax.__version__}"
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        kind, right = device.device_kind, re.search(r"H\d{2,3}\b", device.device_kind)
    elif jax.default_backend() == "gpu":
        gpu = jax.devices()[0]
        kind, right = gpu.device_kind, gpu.compute_capability == "9.0"
    else:
        return None
    if not right:
        return f"needs a GPU of compute capability 9.0, such as an H100, got {kind}"
    return None
