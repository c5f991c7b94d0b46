import math
import pathlib

import jax
import jax.numpy as jnp

from ._clock import Times


_least = 256 << 20


def last_level_cache() -> int | None:
    """The size in bytes of the largest cache of this machine, where that is known."""
    sizes = []
    for path in pathlib.Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        number = path.read_text().strip()
        sizes.append(int(number.removesuffix("K")) << 10)
    return max(sizes, default=None)


def default_cycle() -> int:
    """How many bytes of weights to go through before one comes again: four times what
    the caches hold, and 256 MB at least."""
    return max(_least, 4 * (last_level_cache() or 0))


def default_reading() -> int:
    """How many bytes to read to find how fast memory is."""
    return max(1 << 30, default_cycle())


def number_of_copies(nbytes: int, cycle: int) -> int:
    return min(1024, max(1, math.ceil(cycle / max(1, nbytes))))


_width = 2**14


class Reading:
    """Reads memory as fast as this machine can, on all of its cores: multiplies a
    matrix in float32 with a vector. The vector stays in the caches, and each number
    that is read takes one product and one sum, so that this waits for memory.

    - `nbytes`: how many bytes it reads.
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
        """Bytes a second, in the fastest round."""
        return self.nbytes / min(times.seconds)
