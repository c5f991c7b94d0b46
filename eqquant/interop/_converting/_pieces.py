import functools as ft
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import numpy as np


# So many numbers at a time: few enough for the caches of a processor, and for their
# memory to be nothing beside that of the interpreter.
_numbers = 2**18
_workers = min(4, os.cpu_count() or 1)


class Pieces:
    """Matrices, some rows at a time. Each piece has as many rows, the last of a matrix
    with zeros after its own.

    - `shape`, `dtype`: of a piece.
    """

    def __init__(self, rows: np.ndarray, whole: bool):
        """**Arguments:**

        - `rows`: the matrices, that may be a memory map.
        - `whole`: whether a piece is to be a whole matrix.
        """
        *lead, n, k = rows.shape
        step = n if whole else _step(n, k)
        self.shape, self.dtype = (step, k), rows.dtype
        self._rows = rows
        self._places = [(i, j) for i in np.ndindex(*lead) for j in range(0, n, step)]

    def map(self, f: Callable[..., Any]) -> Iterator[tuple[Any, float]]:
        """Calls `f(piece, index, rows)`, in several threads: `index` is that of the
        matrix, and `rows` where in it the piece is. The piece is only lent.

        **Returns:**

        What `f` returns, in order, and the share of all that this piece was.
        """
        # Each is used over and over: JAX keeps its hold of arrays that it was given,
        # for longer than it needs them, and so it may not be given the memory map.
        buffers = SimpleQueue()
        for _ in range(min(_workers, len(self._places))):
            buffers.put(np.zeros(self.shape, self.dtype))
        *lead, n, _ = self._rows.shape

        def work(place):
            index, start = place
            number = min(self.shape[0], n - start)
            rows = slice(start, start + number)
            buffer = buffers.get()
            buffer[:number] = self._rows[index][rows]
            buffer[number:] = 0
            found = f(buffer, index, rows)
            buffers.put(buffer)
            return found, number / (n * math.prod(lead))

        return _pool().map(work, self._places)


@ft.cache
def _pool():
    return ThreadPoolExecutor(_workers)


def _step(n, k):
    # Of few different sizes, so that little has to be compiled.
    return min(max(1, _numbers // k), 1 << (n - 1).bit_length())
