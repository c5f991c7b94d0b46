import bisect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ._cursor import Cursor
from ._file import check_apart, check_shape, MappedFile, RawTensor, short
from ._json import largest
from ._tensor_file import FileLayout, Part
from ._types import ggml_numbers, ggml_types


gguf_magic = b"GGUF"

# The types of numbers in metadata. (Types 8 and 9 are strings and lists.)
scalars: dict[int, np.dtype] = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
string, array = 8, 9
_numbers_of = {dtype: number for number, dtype in scalars.items()}

# Lists that llama.cpp reads only if their numbers have a sign.
_signed = ("tokenizer.ggml.token_type", "tokenizer.ggml.suppress_tokens")

_default_alignment = 32

# Enough for vocabularies of a million words, with scores, types and merges.
_most_values = 2**22
_most_pairs = 2**16
_most_tensors = 2**19
_most_axes = 4
_longest_text = 2**24


def read_gguf_header(file: MappedFile) -> tuple[dict[str, RawTensor], dict[str, Any]]:
    """Reads the tensors of a file and its metadata, as Python numbers, strings and
    lists. Only the header is read. Raises a `ValueError` if the header is damaged, or
    does not fit the file.

    ??? cite "Reference"

        https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    size = min(file.size, largest)
    cursor = Cursor(file.map(0, size, kept=False).data)
    if cursor.take(4, "its first bytes") != gguf_magic:
        raise ValueError("it is not a GGUF file.")
    version = cursor.uint32("its version")
    if version not in (2, 3):
        swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
        is_swapped = swapped in (2, 3)
        version = "for big-endian machines" if is_swapped else f"of version {version}"
        raise ValueError(
            f"it is a GGUF file {version}. Only little-endian files, of versions 2 and "
            "3, can be read."
        )
    # Each tensor and each pair takes at least this many bytes.
    number = cursor.count("its number of tensors", 24, _most_tensors)
    pairs = cursor.count("its number of metadata", 13, _most_pairs)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        key = cursor.text("a key of its metadata")
        if key in metadata:
            raise ValueError(f"it has the metadata {key!r} twice.")
        metadata[key] = _value(cursor, cursor.uint32(f"the type of {key!r}"), key)
    infos = [_info(cursor) for _ in range(number)]
    alignment = alignment_of(metadata)
    begin = cursor.position + -cursor.position % alignment
    starts = sorted([*(offset for *_, offset in infos), 2**64])
    tensors = {}
    for name, type, shape, offset in infos:
        if name in tensors:
            raise ValueError(f"it has the tensor {name!r} twice.")
        if offset % alignment != 0:
            raise ValueError(
                f"{name!r} should lie at a multiple of {alignment} bytes. Got {offset}."
            )
        after = starts[bisect.bisect_right(starts, offset)]
        end = min(begin + after, file.size)
        tensors[name] = _tensor(name, type, shape, file, begin + offset, end)
    check_apart(tensors.values())
    return tensors, metadata


def alignment_of(metadata: dict[str, Any]) -> int:
    """Returns the alignment of tensors in bytes."""
    alignment = metadata.get("general.alignment", _default_alignment)
    is_int = type(alignment) is int and 0 < alignment <= 2**20
    if not is_int or alignment.bit_count() != 1:
        raise ValueError(f"its alignment should be a power of two. Got {alignment!r}.")
    return alignment


def gguf_layout(parts: Mapping[str, Part], metadata: dict[str, Any]) -> FileLayout:
    """Lays out a GGUF file of version 3."""
    alignment = alignment_of(metadata)
    header = [gguf_magic, _u32(3), _u64(len(parts)), _u64(len(metadata))]
    for key, value in metadata.items():
        header += [_text(key), _to_bytes(key, value)]
    offsets, size = {}, 0
    for name, part in parts.items():
        offsets[name] = size
        size += part.nbytes + -part.nbytes % alignment
        header += [_text(name), _u32(len(part.shape))]
        # The contiguous axis comes first.
        header += [_u64(n) for n in reversed(part.shape)]
        header += [_u32(ggml_numbers[part.kind]), _u64(offsets[name])]
    start = b"".join(header)
    start += bytes(-len(start) % alignment)
    starts = {name: len(start) + offset for name, offset in offsets.items()}
    return FileLayout(start, starts, len(start) + size)


def _u32(x):
    return x.to_bytes(4, "little")


def _u64(x):
    return x.to_bytes(8, "little")


def _to_bytes(key: str, value: Any) -> bytes:
    """Encodes the type and the value of metadata. NumPy numbers keep their types.
    Python integers get 32 bits if these are enough, unsigned if none is negative;
    Python floats get 32 bits. Raises a `ValueError` if GGUF has no such type."""
    if isinstance(value, str):
        return _u32(string) + _text(value)
    if not isinstance(value, list | tuple | np.ndarray):
        numbers = _numbers(key, [value])
        return _u32(_numbers_of[numbers.dtype]) + numbers.tobytes()
    start, end = _u32(array), len(value).to_bytes(8, "little")
    if len(value) > 0 and all(isinstance(x, str) for x in value):
        return start + _u32(string) + end + b"".join(map(_text, value))
    if key in _signed and not isinstance(value, np.ndarray):
        value = np.array(value, np.int32)
    numbers = _numbers(key, value)
    return start + _u32(_numbers_of[numbers.dtype]) + end + numbers.tobytes()


def _text(x: str) -> bytes:
    data = x.encode("utf-8", "surrogateescape")
    return len(data).to_bytes(8, "little") + data


def _numbers(key, values):
    x = np.asarray(values)
    own = isinstance(values, np.ndarray) or any(
        isinstance(v, np.generic) for v in values
    )
    if x.ndim == 1 and not own and x.size > 0:
        if np.issubdtype(x.dtype, np.integer):
            x = x.astype(_integers(int(x.min()), int(x.max())))
        elif np.issubdtype(x.dtype, np.floating):
            x = x.astype(np.float32)
    if x.ndim != 1 or x.dtype not in _numbers_of:
        raise ValueError(
            "`metadata` should have text, booleans, numbers, or lists of one of these. "
            f"Got {short(values)}, for {key!r}."
        )
    return x


def _integers(low, high):
    if low < 0:
        return np.int32 if low >= -(2**31) and high < 2**31 else np.int64
    return np.uint32 if high < 2**32 else np.uint64


def _value(cursor, type, key):
    what = f"its metadata {key!r}"
    if type == string:
        return cursor.text(what, _longest_text, "surrogateescape")
    if type in scalars:
        return cursor.numbers(1, scalars[type], what)[0]
    if type != array:
        raise ValueError(f"{what} has an unknown type, {type}.")
    inner = cursor.uint32(what)
    if inner in scalars:
        length = cursor.count(what, scalars[inner].itemsize, _most_values)
        cursor.spend(length, _most_values)
        return cursor.numbers(length, scalars[inner], what)
    if inner != string:
        raise ValueError(f"{what} is a list of an unknown type, {inner}.")
    length = cursor.count(what, 8, _most_values)
    cursor.spend(length, _most_values)
    return cursor.texts(length, what, "surrogateescape")


def _info(cursor):
    name = cursor.text("the name of a tensor")
    ndim = cursor.uint32(f"{name!r}")
    if ndim > _most_axes:
        raise ValueError(f"{name!r} should have {_most_axes} axes at most. Got {ndim}.")
    # The contiguous axis comes first.
    shape = tuple(reversed([cursor.uint64(f"{name!r}") for _ in range(ndim)]))
    type = cursor.uint32(f"{name!r}")
    return name, type, shape, cursor.uint64(f"{name!r}")


def _tensor(name, number_of_type, shape, file, start, end):
    number = check_shape(name, shape)
    type = ggml_types.get(number_of_type)
    if type is None:
        # The size is not known: the tensor may extend up to the next one.
        kind, dtype, nbytes = f"type {number_of_type}", None, max(0, end - start)
    elif type.is_plain:
        kind, dtype = type.name, type.dtype
        nbytes = number * type.nbytes
    else:
        *lead, k = shape or (1,)
        if k % type.block != 0:
            raise ValueError(
                f"{name!r} should have rows of a multiple of {type.block} numbers, as "
                f"it is of {type.name}. Got shape {shape}."
            )
        kind, dtype = type.name, np.dtype(np.uint8)
        shape = (*lead, k // type.block * type.nbytes)
        nbytes = math.prod(shape)
    if start + nbytes > file.size:
        raise ValueError(
            f"{name!r} should lie in the file: its {nbytes} bytes from byte {start} on "
            f"go past the end, at {file.size}."
        )
    return RawTensor(name, kind, dtype, shape, file, start, nbytes)
