import jax
import jax.numpy as jnp

from ._times import Times


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
