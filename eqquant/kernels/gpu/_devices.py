import re

import jax


def hopper() -> str | None:
    """Why kernels for Hopper cannot be compiled, or `None`. A process without a GPU
    exports programs for others: it assumes Hopper."""
    if jax.__version_info__ < (0, 11, 2):
        return f"needs JAX 0.11.2 or newer, got {jax.__version__}"
    found = _compiled_for()
    if found is None:
        return None
    kind, capability = found
    fits = re.search(r"H\d{2,3}\b", kind) if capability is None else capability == "9.0"
    if not fits:
        return f"needs a GPU of compute capability 9.0, such as an H100, got {kind}"
    return None


def blackwell() -> bool:
    """Whether programs are compiled for a GPU of compute capability 10.0 or more, which
    multiplies microscaled numbers. Not if that is not known."""
    found = _compiled_for()
    if found is None:
        return False
    kind, capability = found
    if capability is None:
        return re.search(r"\bG?B\d{3}\b|Blackwell|RTX 50\d0", kind) is not None
    return re.fullmatch(r"\d\d\.\d", capability) is not None


def _compiled_for() -> tuple[str, str | None] | None:
    """The name of the GPU that the abstract mesh in context names, or else of the first
    one of this process, whose compute capability is known, too."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return device.device_kind, None
    if jax.default_backend() == "gpu":
        gpu = jax.devices()[0]
        return gpu.device_kind, gpu.compute_capability
    return None
