import re

import jax


def hopper() -> str | None:
    """Returns why kernels for Hopper cannot be compiled, or `None` if they can. A
    process without a GPU exports programs for other machines: it assumes Hopper."""
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


# Matches the names of GPUs of compute capability 8.0 or more: for data centers, for
# workstations (RTX A2000 to RTX 6000 Ada, RTX PRO), for consumers, and integrated ones.
_since_ampere = re.compile(
    r"\b(A100|A800|A[1234]0|A10G|A16|A2|L4|L40S?|L20|L2|H\d{2,3}|G?H\d00|G?B\d{2,3})\b"
    r"|RTX [3-5]0[5-9]0|RTX A\d{4}|\bAda\b|RTX PRO|Orin|Thor"
)


def ampere() -> str | None:
    """Returns why kernels for Ampere and all newer GPUs cannot run, or `None` if they
    can. They cannot if the GPU is unknown."""
    found = _compiled_for()
    wanted = "needs a GPU of compute capability 8.0 or more, such as an A100, got"
    if found is None:
        return f"{wanted} none"
    kind, capability = found
    if capability is None:
        fits = _since_ampere.search(kind) is not None
    else:
        fits = int(capability.split(".")[0]) >= 8
    return None if fits else f"{wanted} {kind}"


def blackwell() -> bool:
    """Whether programs are compiled for a GPU of compute capability 10.0 or more, which
    multiplies microscaled numbers. `False` if the GPU is unknown."""
    found = _compiled_for()
    if found is None:
        return False
    kind, capability = found
    if capability is None:
        return re.search(r"\bG?B\d{3}\b|Blackwell|RTX 50\d0", kind) is not None
    return re.fullmatch(r"\d\d\.\d", capability) is not None


def capability() -> int:
    """Returns ten times the compute capability of the GPU for which programs are
    compiled: 80 for an A100, and also if it is unknown."""
    found = _compiled_for()
    if found is None or found[1] is None:
        return 80
    return int(found[1].replace(".", ""))


def compiled_for() -> str | None:
    """Returns the name of the GPU for which programs are compiled, or `None` if it is
    unknown."""
    found = _compiled_for()
    return None if found is None else found[0]


def _compiled_for() -> tuple[str, str | None] | None:
    """Returns the name and the compute capability of the GPU for which programs are
    compiled, or `None` if there is none. A GPU named by the abstract mesh in context
    comes first, but its capability is unknown (`None`). Otherwise this is the first GPU
    of the process."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None and device.platform == "gpu":
        return device.device_kind, None
    if jax.default_backend() == "gpu":
        gpu = jax.devices()[0]
        return gpu.device_kind, gpu.compute_capability
    return None
