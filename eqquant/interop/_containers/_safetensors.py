import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from ._file import check_apart, check_shape, MappedFile, RawTensor, short
from ._json import parse
from ._tensor_file import FileLayout
from ._types import dtypes


# A tensor takes about 150 bytes of it, and at least 50, of which four are colons.
largest_header = 6 * 2**20
_most = 1 / 12

# Several to a byte: their sizes are known, but NumPy has no such arrays.
_bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def starts_safetensors(start: bytes) -> bool:
    """Whether a file may be one of safetensors, by its first bytes."""
    return start[8:9] == b"{"


def read_safetensors(
    file: MappedFile, largest_header: int
) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """The tensors of a file, of which only the header is read, and its metadata.

    ??? cite "Reference"

        https://github.com/huggingface/safetensors, "Format".

    **Raises:**

    A `ValueError` if the header is not one, or if the file is not what it tells of.
    """
    start = file.start(8)
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > file.size - 8:
        raise ValueError(
            f"it should have a header of {size} bytes, but it has {file.size} as a "
            "whole: it is cut short, or not a safetensors file."
        )
    if size > largest_header:
        raise ValueError(
            f"its header should take {largest_header} bytes at most. Got {size}."
        )
    header = parse(file.map(8, size).tobytes(), "its header", _most)
    # MLX writes null.
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(f"its metadata is not text, but {short(metadata)}.")
    begin = 8 + size
    tensors = dict(_tensors(header, file, begin))
    check_apart(tensors.values())
    # As they do not overlap, this leaves no gaps.
    total = sum(tensor.nbytes for tensor in tensors.values())
    if begin + total != file.size:
        raise ValueError(
            f"its {len(tensors)} tensors take {total} bytes, but {file.size - begin} "
            "follow its header."
        )
    return tensors, metadata


def safetensors_layout(
    types: Mapping[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
) -> FileLayout:
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
    return FileLayout(header, starts, len(header) + size)


def _tensors(
    header: dict[str, Any], file: MappedFile, begin: int
) -> Iterator[tuple[str, RawTensor]]:
    for name, entry in header.items():
        if not isinstance(entry, dict) or not entry.keys() == _fields:
            raise ValueError(
                f"{short(name)} should have a dtype, a shape and offsets. Got "
                f"{short(entry)}."
            )
        kind, shape, offsets = (
            entry[key] for key in ("dtype", "shape", "data_offsets")
        )
        if not isinstance(kind, str) or not (kind in dtypes or kind in _bits):
            raise ValueError(f"{short(name)} has an unknown dtype, {short(kind)}.")
        if not isinstance(shape, list):
            raise ValueError(f"{short(name)} has no shape, but {short(shape)}.")
        number = check_shape(name, shape)
        if not (
            isinstance(offsets, list)
            and len(offsets) == 2
            and all(type(offset) is int for offset in offsets)
            and 0 <= offsets[0] <= offsets[1] <= file.size - begin
        ):
            raise ValueError(
                f"{short(name)} should lie in the {file.size - begin} bytes that "
                f"follow the header. Got the offsets {short(offsets)}: the file is cut "
                "short, or damaged."
            )
        nbytes = offsets[1] - offsets[0]
        expected = math.ceil(number * _bits_of(kind) / 8)
        if nbytes != expected:
            raise ValueError(
                f"{short(name)} should take {expected} bytes, as {kind} of shape "
                f"{tuple(shape)}. Got {nbytes}."
            )
        dtype = dtypes.get(kind)
        start = begin + offsets[0]
        yield name, RawTensor(name, kind, dtype, tuple(shape), file, start, nbytes)


_fields = {"dtype", "shape", "data_offsets"}


def _bits_of(kind):
    return _bits[kind] if kind in _bits else 8 * dtypes[kind].itemsize
