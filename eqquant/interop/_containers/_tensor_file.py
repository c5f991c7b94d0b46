import math
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from ._types import dtypes, ggml_numbers, ggml_types


class Part(NamedTuple):
    """A tensor to write to a file.

    - `kind`: the file's name of its dtype: `"BF16"`, or `"Q4_K"`.
    - `shape`: its shape in the file.
    - `make`: computes the numbers when they are written.
    """

    kind: str
    shape: tuple[int, ...]
    make: Callable[[], np.ndarray]

    @property
    def type(self) -> tuple[str, tuple[int, ...]]:
        return self.kind, self.shape

    @property
    def nbytes(self) -> int:
        if self.kind in dtypes:
            return math.prod(self.shape) * dtypes[self.kind].itemsize
        type = ggml_types[ggml_numbers[self.kind]]
        return math.prod(self.shape) // type.block * type.nbytes


class FileLayout(NamedTuple):
    """The header of a file, the places of its tensors, and its size in bytes."""

    header: bytes
    starts: dict[str, int]
    size: int


class TensorFile:
    """Writes a file of tensors: first the header, then the tensors, in any order. Until
    they are written, tensors are zeros."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        parts: Mapping[str, Part],
        layout: FileLayout,
        resume: bool = False,
    ):
        self._parts, self._layout = parts, layout
        self._file = open(path, "r+b" if resume else "wb")
        if not resume:
            self._file.write(layout.header)
            self._file.truncate(layout.size)

    def write(self, name: str, x: np.ndarray) -> None:
        part = self._parts[name]
        x = np.ascontiguousarray(x)
        if x.nbytes != part.nbytes:
            raise ValueError(
                f"{name!r} should take {part.nbytes} bytes, as {part.kind} of shape "
                f"{part.shape}. Got {x.nbytes}."
            )
        self._file.seek(self._layout.starts[name])
        self._file.write(x.reshape(-1).view(np.uint8).data)

    def __enter__(self) -> "TensorFile":
        return self

    def __exit__(self, *exception: object) -> None:
        self._file.close()
