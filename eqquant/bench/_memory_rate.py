import math
import os
import pathlib

import jax
import jax.numpy as jnp

from ._clock import Times


_least = 256 << 20


def last_level_cache() -> int | None:
    """Returns the size in bytes of the largest cache of this machine, or `None` if
    unknown."""
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = path.read_text("utf-8").strip()
        sizes.append(int(number.removesuffix("K")) << 10)
    return max(sizes, default=None)


def physical_memory() -> int | None:
    """Returns the bytes of memory of this machine, or `None` if unknown."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError):  # Not every system has these.
        return None


def default_cycle() -> int:
    """Returns the bytes of weights to cycle through, so that each is read from memory:
    four times the size of the largest cache, and at least 256 MB."""
    return max(_least, 4 * (last_level_cache() or 0))


def default_reading() -> int:
    """Returns the number of bytes to read when measuring the memory bandwidth."""
    return max(1 << 30, default_cycle())


def number_of_copies(nbytes: int, cycle: int) -> int:
    """Returns the number of weights of `nbytes` bytes that fill a cycle."""
    return min(1024, max(1, math.ceil(cycle / max(1, nbytes))))


_width = 2**14


class Reading:
    """Reads memory as fast as this machine can, on all cores: multiplies a float32
    matrix by a vector. The vector stays in cache, and each number of the matrix takes
    only one multiplication and one addition, so that memory is the bottleneck.

    - `nbytes`: the number of bytes that it reads.
    """

    nbytes: int

    def __init__(self, nbytes: int):
        self._matrix = jnp.ones((max(1, nbytes // (4 * _width)), _width))
        self._vector = jnp.ones(_width)
        product = jax.jit(jnp.matmul).lower(self._matrix, self._vector)
        self._product = product.compile()
        self.nbytes = self._matrix.nbytes

    def __call__(self) -> None:
        self._product(self._matrix, self._vector).block_until_ready()

    def rate(self, times: Times) -> float:
        """Returns the bytes per second of the fastest round."""
        return self.nbytes / min(times.seconds)
