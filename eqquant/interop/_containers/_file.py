import math
import os
import reprlib
import stat
import weakref
from collections.abc import Iterable

import numpy as np

from .._files import read_only


# `reprlib` limits the work, too: parts that are cut off are never formatted.
_repr = reprlib.Repr()
_repr.maxlist = _repr.maxtuple = _repr.maxdict = 20
_repr.maxstring = _repr.maxother = _repr.maxlong = 200

# Below this size, reading is faster than mapping.
_page = 2**16


class MappedFile:
    """A file that is open for reading, and is mapped into memory piece by piece."""

    def __init__(self, path: str | os.PathLike[str]):
        self.path = os.fspath(path)
        # Opening a pipe would block.
        if not stat.S_ISREG(os.stat(self.path).st_mode):
            raise ValueError(f"{self.path!r} should be a file.")
        self._file = read_only(self.path)
        # The file is closed at the latest when nothing refers to this object.
        self.close = weakref.finalize(self, self._file.close)
        self.size = self._file.size()

    def start(self, size: int) -> bytes:
        """Returns the first `size` bytes, or all if there are fewer."""
        return self._file.read(0, size)

    def map(self, start: int, size: int, kept: bool = True) -> np.ndarray:
        """Maps a part of the file, as a read-only array of bytes. It is unmapped with
        the array and its views. Pass `kept=False` only if these are dropped before the
        file may be replaced."""
        if not self.close.alive:
            raise ValueError(f"{self.path!r} is closed.")
        # Reading a map past the end of its file kills the process.
        if start + size > self._file.size():
            raise ValueError(f"{self.path!r} was cut short since it was opened.")
        if size < _page:
            return np.frombuffer(self._file.read(start, size), np.uint8)
        return self._file.map(start, size, kept)


class RawTensor:
    """A tensor in a file, whose position and shape have been checked.

    - `name`: its name in the file.
    - `kind`: the file's name of its dtype: `"BF16"`, or `"Q4_K"`.
    - `dtype`, `shape`: the dtype and the shape of the array that `read` returns, which
      has bytes for block types. `dtype` is `None` if NumPy or this library has no such
      dtype; `read` then raises a `ValueError`.
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
        """The path of its file."""
        return self._file.path

    @property
    def span(self) -> tuple[int, int, str]:
        """The start and the end of the tensor in the file, and its name."""
        return self._start, self._start + self.nbytes, self.name

    def read(self) -> np.ndarray:
        """Returns the tensor as a read-only NumPy array. This is a memory map of the
        tensor alone, which is unmapped with the array."""
        if self.dtype is None:
            raise ValueError(
                f"{self.name!r} is of {self.kind}, which this library does not read."
            )
        data = self._file.map(self._start, self.nbytes)
        if self._start % self.dtype.itemsize != 0:
            # Not every processor reads unaligned numbers.
            data = np.array(data)
        if self.dtype == np.bool_ and np.any(data > 1):
            # NumPy treats such a boolean as neither true nor false.
            raise ValueError(
                f"{self.name!r} should have bytes of 0 and 1, as it is of {self.kind}. "
                f"Got {np.max(data)}: the file is damaged."
            )
        return data.view(self.dtype).reshape(self.shape)

    def __repr__(self):
        return f"RawTensor({self.name!r}, {self.kind}, {self.shape})"


def check_shape(name: str, shape: list | tuple) -> int:
    """Returns the number of elements in a tensor. Raises a `ValueError` if this is not
    a shape, or is too large for an array."""
    if not all(type(size) is int and 0 <= size < 2**63 for size in shape):
        raise ValueError(f"{name!r} should have sizes for a shape. Got {short(shape)}.")
    if len(shape) > 32:
        raise ValueError(f"{name!r} should have 32 axes at most. Got {len(shape)}.")
    # Empty arrays are refused, too, if their other sizes are large.
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
    """Returns the start of `repr(x)`, for messages: values in files may be long."""
    text = _repr.repr(x)
    return text if len(text) <= 100 else f"{text[:100]}..."
