import os
import platform

import jax

from ..kernels import processor


# Maps the names of instruction sets in `/proc/cpuinfo` to their usual names.
_features = {
    "avx2": "AVX2",
    "avx512f": "AVX512",
    "avx_vnni": "AVX-VNNI",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
    "asimddp": "DOTPROD",
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
}


def describe_machine() -> str:
    """Returns a line about the processor, its instruction sets, and the versions of JAX
    and Python."""
    info = processor()
    name = info.get("model name") or platform.processor() or platform.machine()
    flags = (info.get("flags") or info.get("Features") or "").split()
    features = [name for flag, name in _features.items() if flag in flags]
    parts = [
        f"{name}, {os.cpu_count()} cores",
        ", ".join(features) if features else "unknown instruction sets",
        f"JAX {jax.__version__} on {jax.devices()[0].device_kind}",
        f"Python {platform.python_version()}",
    ]
    return "; ".join(parts)


def has_slow_lookups() -> bool:
    """Whether the XLA:CPU of this version of JAX is slow at lookups in small tables."""
    return jax.default_backend() == "cpu" and jax.__version_info__ < (0, 11)
