import json
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ._file import check_apart, check_shape, MappedFile, RawTensor, short
from ._json import largest, parse
from ._tensor_file import FileLayout
from ._types import dtypes


# The bits of packed dtypes, which NumPy does not have.
_bits = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def starts_safetensors(start: bytes) -> bool:
    """Whether a file begins like safetensors."""
    return start[8:9] == b"{"


def read_safetensors(
    file: MappedFile,
) -> tuple[dict[str, RawTensor], dict[str, str]]:
    """Reads the tensors of a file and its metadata. Only the header is read. Raises a
    `ValueError` if the header is damaged, or does not fit the file.

    ??? cite "Reference"

        https://github.com/huggingface/safetensors, "Format".
    """
    start = file.start(8)
    size = int.from_bytes(start, "little")
    if len(start) < 8 or size > file.size - 8:
        raise ValueError(
            f"it should have a header of {size} bytes, but has {file.size} in all: it "
            "is cut short, or not a safetensors file."
        )
    if size > largest:
        raise ValueError(f"its header should take {largest} bytes at most. Got {size}.")
    header = parse(file.map(8, size, kept=False).tobytes(), "its header")
    # MLX writes null.
    metadata = header.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(
        isinstance(value, str) for value in metadata.values()
    ):
        raise ValueError(f"its metadata is not text, but {short(metadata)}.")
    begin = 8 + size
    tensors = dict(_tensors(header, file, begin))
    check_apart(tensors.values())
    # Tensors do not overlap, so this also rules out gaps.
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
    """Lays out a safetensors file, given the name of the dtype and the shape of each
    tensor."""
    itemsizes = {name: dtypes[kind].itemsize for name, (kind, _) in types.items()}
    entries: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    starts, size = {}, 0
    # In order of decreasing item sizes, all tensors are aligned.
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
    if len(header) > largest:
        raise ValueError(
            f"The header of {len(types)} tensors would take {len(header)} bytes. "
            f"Readers take {largest} at most: write several files."
        )
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
        if not isinstance(kind, str) or not _kind.fullmatch(kind):
            raise ValueError(
                f"{short(name)} should have a dtype. Got {short(kind)} instead."
            )
        if not isinstance(shape, list):
            raise ValueError(f"{short(name)} has an invalid shape: {short(shape)}.")
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
        bits = _bits_of(kind)
        # The size is not known if the dtype is not.
        expected = nbytes if bits is None else math.ceil(number * bits / 8)
        if nbytes != expected:
            raise ValueError(
                f"{short(name)} should take {expected} bytes, as {kind} of shape "
                f"{tuple(shape)}. Got {nbytes}."
            )
        dtype = dtypes.get(kind)
        start = begin + offsets[0]
        yield name, RawTensor(name, kind, dtype, tuple(shape), file, start, nbytes)


_kind = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,30}")
_fields = {"dtype", "shape", "data_offsets"}


def _bits_of(kind):
    return 8 * dtypes[kind].itemsize if kind in dtypes else _bits.get(kind)
