import functools as ft
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np


# The number of elements in a piece: few enough to fit into the caches of a processor.
_numbers = 2**18
_workers = min(4, os.cpu_count() or 1)


class Pieces:
    """Pieces of matrices, of some rows each. All pieces have the same number of rows;
    the last of a matrix is padded with zeros.

    - `shape`, `dtype`: the shape and the dtype of a piece.
    """

    def __init__(self, rows: np.ndarray, whole: bool):
        """**Arguments:**

        - `rows`: the matrices, which may be a memory map.
        - `whole`: whether a piece is a whole matrix.
        """
        *lead, n, k = rows.shape
        step = n if whole else _step(n, k)
        self.shape, self.dtype = (step, k), rows.dtype
        self._rows = rows
        self._places = [(i, j) for i in np.ndindex(*lead) for j in range(0, n, step)]

    def map(self, f: Callable[..., Any]) -> Iterator[tuple[Any, float]]:
        """Calls `f(piece, index, rows)` in several threads, where `index` is the index
        of the matrix, and `rows` the slice of its rows. The buffer of a piece is reused
        after `f` returns; do not keep it. Returns the results of `f`, in order, each
        with the piece's share of all rows."""
        # Pieces are copied into reused buffers, because JAX holds on to its arguments
        # longer than it needs them, which would keep memory maps alive.
        buffers = SimpleQueue()
        for _ in range(min(_workers, len(self._places))):
            buffers.put(np.zeros(self.shape, self.dtype))
        *lead, n, _ = self._rows.shape

        def work(place):
            index, start = place
            number = min(self.shape[0], n - start)
            rows = slice(start, start + number)
            buffer = buffers.get()
            try:
                buffer[:number] = self._rows[index][rows]
                buffer[number:] = 0
                return f(buffer, index, rows), number / (n * math.prod(lead))
            finally:
                # Return the buffer after an error, too: other threads may wait for it.
                buffers.put(buffer)

        return _pool().map(work, self._places)


@ft.cache
def _pool():
    return ThreadPoolExecutor(_workers)


def _step(n, k):
    # A power of two for small matrices, so that few shapes are compiled.
    return min(max(1, _numbers // k), 1 << (n - 1).bit_length())
