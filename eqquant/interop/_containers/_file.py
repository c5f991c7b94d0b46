import math
import mmap
import os
import stat
import weakref
from collections.abc import Iterable

import numpy as np


# Of what is smaller, to make a map takes longer.
_page = 2**16


class MappedFile:
    """A file that stays open for reading. Nothing of it is read before it is asked for,
    and what is asked for is mapped into memory, rather than copied."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        # A pipe would be waited for.
        if not stat.S_ISREG(os.stat(self.path).st_mode):
            raise ValueError(f"{self.path!r} should be a file.")
        self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        # With the last that refers to it.
        self.close = weakref.finalize(self, os.close, self._descriptor)
        self.size = os.fstat(self._descriptor).st_size

    def start(self, size: int) -> bytes:
        """Up to so many bytes from the beginning."""
        return os.pread(self._descriptor, size, 0)

    def map(self, start: int, size: int) -> np.ndarray:
        """Some of its bytes. They leave the memory with the array, as far as nothing
        else is made of it."""
        if not self.close.alive:
            raise ValueError(f"{self.path!r} is closed.")
        # To read behind its end would end the process.
        if start + size > os.fstat(self._descriptor).st_size:
            raise ValueError(f"{self.path!r} was cut short since it was opened.")
        if size < _page:
            return np.frombuffer(os.pread(self._descriptor, size, start), np.uint8)
        before = start % mmap.ALLOCATIONGRANULARITY
        data = mmap.mmap(
            self._descriptor,
            before + size,
            access=mmap.ACCESS_READ,
            offset=start - before,
        )
        return np.frombuffer(data, np.uint8, size, before)


class RawTensor:
    """A tensor as it lies in a file, and as what was checked of it.

    - `kind`: its dtype, in the words of the file: `"BF16"`, or `"Q4_K"`.
    - `dtype`, `shape`: of the array that `read` gives: for blocks of bytes, those.
    """

    __slots__ = ("name", "kind", "dtype", "shape", "_file", "_start", "nbytes")

    def __init__(
        self,
        name: str,
        kind: str,
        dtype: np.dtype | None,
        shape: tuple[int, ...],
        file: MappedFile,
        start: int,
        nbytes: int,
    ):
        self.name, self.kind, self.dtype, self.shape = name, kind, dtype, shape
        self._file, self._start, self.nbytes = file, start, nbytes

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def path(self) -> str:
        """Of the file that it is in."""
        return self._file.path

    @property
    def span(self) -> tuple[int, int, str]:
        """Where it starts, where it ends, and its name."""
        return self._start, self._start + self.nbytes, self.name

    def read(self) -> np.ndarray:
        """Its numbers. An array of NumPy that cannot be written to, over the memory map
        of this tensor alone: once it is dropped, so is the map."""
        if self.dtype is None:
            raise ValueError(
                f"{self.name!r} is of {self.kind}, which this library does not read."
            )
        data = self._file.map(self._start, self.nbytes)
        if self._start % self.dtype.itemsize != 0:
            # Not every processor reads numbers that lie across.
            data = np.array(data)
        return data.view(self.dtype).reshape(self.shape)

    def __repr__(self):
        return f"RawTensor({self.name!r}, {self.kind}, {self.shape})"


def check_shape(name: str, shape: list | tuple) -> int:
    """How many numbers there are.

    **Raises:**

    A `ValueError` if this is not a shape, or not one that can be indexed.
    """
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"{name!r} should have sizes for a shape. Got {short(shape)}.")
    if len(shape) > 32:
        raise ValueError(f"{name!r} should have 32 axes at most. Got {len(shape)}.")
    # Without the zeros: what is empty may not seem large.
    number = math.prod(size or 1 for size in shape)
    if number >= (2**20 if 0 in shape else 2**63):
        raise ValueError(f"{name!r} is too large to be one array: {tuple(shape)}.")
    return math.prod(shape)


def check_apart(tensors: Iterable[RawTensor]) -> None:
    """Raises a `ValueError` if two tensors of a file share bytes."""
    spans = sorted(tensor.span for tensor in tensors if tensor.nbytes > 0)
    for (_, end, name), (start, _, other) in zip(spans, spans[1:]):
        if start < end:
            raise ValueError(f"{name!r} and {other!r} overlap.")


def short(x: object) -> str:
    """For a message: a file may hold anything."""
    text = repr(x)
    return text if len(text) <= 100 else f"{text[:100]}..."
