import ctypes
import math
import mmap
import os
import sys
from typing import Any

import numpy as np
from jaxtyping import Shaped

from . import _library as library


# More threads do not write memory faster.
_most_threads = 8
_large = 2**21


def threads() -> int:
    """Returns the number of threads for work that is bound by memory."""
    if hasattr(os, "sched_getaffinity"):
        return min(_most_threads, len(os.sched_getaffinity(0)))
    return min(_most_threads, os.cpu_count() or 1)


def empty(shape: tuple[int, ...], dtype: Any) -> Shaped[np.ndarray, "..."]:
    """Allocates memory for an array that JAX on a CPU need not copy."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    large = sys.platform == "linux" and size >= _large
    memory = _fresh(size + 64) if large else np.empty(size + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + size].view(dtype).reshape(shape)


def _fresh(size):
    # (NumPy would ask for large pages, which a virtual machine may take several times
    # as long to find.)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    memory = np.frombuffer(mmap.mmap(-1, size, flags=flags), np.uint8)
    if library.missing() is None:
        # Fresh memory is filled with zeros when it is first touched. That takes as long
        # as all other work, but less on several threads.
        address = ctypes.c_void_p(memory.ctypes.data)
        count = ctypes.c_int64(threads())
        library.loaded().eqquant_touch(address, ctypes.c_int64(size), count)
    return memory
