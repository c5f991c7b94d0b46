import contextlib
import ctypes
import math
import mmap
import os
import sys
from typing import Any

import numpy as np
from jaxtyping import Shaped

from . import _library as library


# More do not make the memory faster.
_most_threads = 8
_huge = 2**21


def threads() -> int:
    """How many threads to use for what takes little more than to move memory."""
    if sys.platform == "linux":
        return min(_most_threads, len(os.sched_getaffinity(0)))
    return min(_most_threads, os.cpu_count() or 1)


def empty(shape: tuple[int, ...], dtype: Any) -> Shaped[np.ndarray, "..."]:
    """Memory for an array, where JAX on a CPU need not copy it."""
    dtype = np.dtype(dtype)
    size = math.prod(shape) * dtype.itemsize
    if sys.platform != "linux" or size < _huge:
        memory = np.empty(size + 64, np.uint8)
        start = -memory.ctypes.data % 64
    else:
        memory, start = _fresh(size)
    return memory[start : start + size].view(dtype).reshape(shape)


def _fresh(size):
    # Memory that was not used before is filled with zeros when it is first touched,
    # which takes as long as all else. Large pages make that faster.
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    owner = mmap.mmap(-1, size + _huge, flags=flags)
    memory = np.frombuffer(owner, np.uint8)
    start = -memory.ctypes.data % _huge
    # (Some kernels have none.)
    with contextlib.suppress(OSError):
        owner.madvise(mmap.MADV_HUGEPAGE, start, size // _huge * _huge)
    if library.missing() is None:
        touch = library.loaded().eqquant_touch
        address = ctypes.c_void_p(memory.ctypes.data + start)
        touch(address, ctypes.c_int64(size), ctypes.c_int64(threads()))
    return memory, start
