from typing import Any

import numpy as np

from .._containers import array, scalars, short, string


_types = {dtype: number for number, dtype in scalars.items()}


def to_value(key: str, value: Any) -> bytes:
    """A value of the metadata of GGUF: its type, and itself. NumPy's numbers keep their
    types. Python's integers are of 32 bits if that is enough, and unsigned if none is
    negative; its floats are of 32.

    **Raises:**

    A `ValueError` if there is no such type.
    """
    if isinstance(value, str):
        return _u32(string) + text(value)
    if not isinstance(value, list | tuple | np.ndarray):
        numbers = _numbers(key, [value])
        return _u32(_types[numbers.dtype]) + numbers.tobytes()
    start, end = _u32(array), len(value).to_bytes(8, "little")
    if len(value) > 0 and all(isinstance(x, str) for x in value):
        return start + _u32(string) + end + b"".join(map(text, value))
    numbers = _numbers(key, value)
    return start + _u32(_types[numbers.dtype]) + end + numbers.tobytes()


def text(x: str) -> bytes:
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
    if x.ndim != 1 or x.dtype not in _types:
        raise ValueError(
            "`metadata` should have text, booleans, numbers, or lists of one of these. "
            f"Got {short(values)}, for {key!r}."
        )
    return x


def _integers(low, high):
    if low < 0:
        return np.int32 if low >= -(2**31) and high < 2**31 else np.int64
    return np.uint32 if high < 2**32 else np.uint64


def _u32(x):
    return x.to_bytes(4, "little")
