import json
import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .._containers import alignment_of, dtypes, ggml_numbers, gguf_magic
from ._part import Part
from ._values import text, to_value


class Layout(NamedTuple):
    """What a file begins with, where each tensor lies in it, and how many bytes it has
    as a whole."""

    header: bytes
    starts: dict[str, int]
    size: int


class TensorFile:
    """A file of tensors that is being written: the header first, and then each tensor
    to its place, in any order. As long as one is missing, there are zeros."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        parts: Mapping[str, Part],
        layout: Layout,
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


def safetensors_layout(
    types: Mapping[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> Layout:
    """The layout of a file of safetensors.

    **Arguments:**

    - `types`: the dtype of each tensor, in the words of the file, and its shape.
    """
    itemsizes = {name: dtypes[kind].itemsize for name, (kind, _) in types.items()}
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, size = {}, 0
    # The largest numbers come first, so that all are aligned.
    for name in sorted(types, key=lambda name: (-itemsizes[name], name)):
        kind, shape = types[name]
        starts[name] = size
        size += math.prod(shape) * itemsizes[name]
        entries[name] = {
            "dtype": kind,
            "shape": shape,
            "data_offsets": (starts[name], size),
        }
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    header = len(header).to_bytes(8, "little") + header
    starts = {name: len(header) + start for name, start in starts.items()}
    return Layout(header, starts, len(header) + size)


def gguf_layout(parts: Mapping[str, Part], metadata: dict[str, Any]) -> Layout:
    """The layout of a file of GGUF, version 3."""
    alignment = alignment_of(metadata)
    header = [gguf_magic, _u32(3), _u64(len(parts)), _u64(len(metadata))]
    for key, value in metadata.items():
        header += [text(key), to_value(key, value)]
    offsets, size = {}, 0
    for name, part in parts.items():
        offsets[name] = size
        size += part.nbytes + -part.nbytes % alignment
        header += [text(name), _u32(len(part.shape))]
        # The contiguous axis comes first.
        header += [_u64(n) for n in reversed(part.shape)]
        header += [_u32(ggml_numbers[part.kind]), _u64(offsets[name])]
    start = b"".join(header)
    start += bytes(-len(start) % alignment)
    starts = {name: len(start) + offset for name, offset in offsets.items()}
    return Layout(start, starts, len(start) + size)


def _u32(x):
    return x.to_bytes(4, "little")


def _u64(x):
    return x.to_bytes(8, "little")
