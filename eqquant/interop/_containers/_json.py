import json
import os
from typing import Any

import numpy as np

from ._file import MappedFile, short


# The largest size in bytes of headers, indexes and configurations, as in other readers
# of safetensors. A tensor takes about 130 bytes of a header.
largest = 100_000_000

# Limits for the estimated memory of the values in JSON: per byte of text, and in all.
# The header of half a million tensors reaches the second.
_most_by_byte, _most_in_all = 24, 500_000_000
_of_list, _of_other, _free = 100, 50, 2**20

# Python's own limit differs between its versions.
_deepest = 500

_brackets = b"[{]}"
_others = bytes(set(range(256)) - set(_brackets))
_steps = np.zeros(256, np.int8)
_steps[list(_brackets)] = 1, 1, -1, -1


def parse(text: bytes, what: str) -> dict[str, Any]:
    """Parses a JSON object, in time and memory that its size bounds. Raises a
    `ValueError` if it is not a JSON object, if it has too many or too deeply nested
    values, or if an object in it has a key twice. `what` is its name in messages."""
    check_bounds(text, what)
    try:
        # Some editors begin a file with a byte-order mark.
        found = json.loads(text.decode("utf-8-sig"), object_pairs_hook=_unique)
    except _Twice as e:
        raise ValueError(f"{what} has {short(e.args[0])} twice.") from None
    except (ValueError, RecursionError) as e:
        raise ValueError(f"{what} is not JSON ({short(str(e))}).") from e
    if not isinstance(found, dict):
        raise ValueError(f"{what} should be a JSON object. Got {short(found)}.")
    return found


def check_bounds(text: bytes, what: str) -> None:
    """Raises a `ValueError` if JSON has too many values, or too deeply nested ones, to
    be read."""
    # Without escapes, every quotation mark begins or ends a string.
    data = text.replace(b"\\\\", b"").replace(b'\\"', b"")
    codes = np.frombuffer(data, np.uint8)
    outside = codes[~np.logical_xor.accumulate(codes == ord('"'))].tobytes()
    del codes, data
    brackets = outside.translate(None, _others)
    others = outside.count(b'"') + outside.count(b":") + outside.count(b",")
    del outside
    lists = brackets.count(b"[") + brackets.count(b"{")
    memory = _of_list * lists + _of_other * others
    if memory > min(_free + _most_by_byte * len(text), _most_in_all):
        raise ValueError(f"{what} should be JSON of fewer keys and lists.")
    if lists > _deepest:
        steps = _steps[np.frombuffer(brackets, np.uint8)]
        depth = int(np.cumsum(steps, dtype=np.int32).max())
        if depth > _deepest:
            raise ValueError(
                f"{what} should be nested {_deepest} levels deep at most. Got {depth}."
            )


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """Reads a file of moderate size. Raises a `ValueError` if it is too large."""
    file = MappedFile(path)
    try:
        if file.size > largest:
            raise ValueError(f"{file.path!r} should have {largest} bytes at most.")
        return file.start(file.size)
    finally:
        file.close()


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Reads the JSON object in a file. Raises a `ValueError` if it is too large, or not
    a JSON object."""
    return parse(read_bytes(path), repr(os.fspath(path)))


class _Twice(Exception):
    pass


def _unique(pairs):
    found = dict(pairs)
    if len(found) != len(pairs):
        seen = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found
