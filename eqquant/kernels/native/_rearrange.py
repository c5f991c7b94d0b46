import ctypes
import functools as ft
from collections.abc import Mapping

import numpy as np
from jaxtyping import Shaped, UInt8

from ...formats import Code
from . import _library as library
from ._memory import threads


# The structs `Field` and `Target` of `src/arrays/rearrange.h`.
_field = np.dtype([(name, np.int32) for name in ("byte", "start", "number", "at")])
_target = np.dtype(
    [(name, np.int64) for name in ("memory", "stride", "elements", "size")]
)


class _Rearranged(ctypes.Structure):
    _fields_ = (
        ("source", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("rows", "blocks", "bytes")),
        ("targets", ctypes.c_void_p),
        ("number", ctypes.c_int64),
        ("counts", ctypes.c_void_p),
        ("fields", ctypes.c_void_p),
    )


def can_rearrange() -> bool:
    """Whether the native library, which `rearrange` needs, can be called."""
    return library.missing() is None


def rearrange(
    rows: UInt8[np.ndarray, "*b _"],
    block: int,
    fields: Mapping[str, tuple[Code, ...]],
    to: Mapping[str, Shaped[np.ndarray, "..."]],
) -> None:
    """Writes rows of blocks, as in files, to stored arrays whose contracted axis comes
    first. Only call this if `can_rearrange` is true.

    - `rows`: the last axis has the bytes of whole blocks, one after another. Other axes
        may have any strides, so transposed files need no copy.
    - `block`: the number of bytes in a block, 16 or more.
    - `fields`: the places of the elements of each stored array in a block.
    - `to`: the memory of these arrays, of one or two bytes an element and of shape
        `*c j n`. The last axis is contiguous. `*c` and `n` together run over the rows
        `*b`, in the same order.
    """
    starts = _starts(rows)
    *lead, _, n = next(iter(to.values())).shape
    blocks = rows.shape[-1] // block
    for name, a in to.items():
        wanted = (*lead, blocks * len(fields[name]), n)
        assert a.shape == wanted, (name, a.shape, wanted)
    assert block >= 16 and starts.size == int(np.prod(lead)) * n, (block, starts.size)
    if rows.size == 0:
        return
    assert rows.strides[-1] == 1, rows.strides
    for name, a in to.items():
        assert a.itemsize <= 2 and a.strides[-1] == a.itemsize, (name, a.dtype)
    counts, packed = _packed(tuple(fields[name] for name in to))
    for i, index in enumerate(np.ndindex(*lead)):
        targets = np.array(
            [
                (a[index].ctypes.data, a.strides[-2], len(fields[name]), a.itemsize)
                for name, a in to.items()
            ],
            _target,
        )
        arguments = _Rearranged(
            source=rows.ctypes.data,
            starts=starts[i * n :].ctypes.data,
            rows=n,
            blocks=blocks,
            bytes=block,
            targets=targets.ctypes.data,
            number=len(targets),
            counts=counts.ctypes.data,
            fields=packed.ctypes.data,
        )
        function = library.loaded().eqquant_rearrange
        if not function(ctypes.byref(arguments), ctypes.c_int64(threads())):
            raise MemoryError("There is no memory to rearrange blocks.")


def _starts(rows):
    # The offset of each row, in bytes.
    found = np.zeros((), np.int64)
    for size, stride in zip(rows.shape[:-1], rows.strides[:-1]):
        found = found[..., None] + np.arange(size, dtype=np.int64) * stride
    return found.reshape(-1)


@ft.cache
def _packed(targets: tuple[tuple[Code, ...], ...]):
    codes = [code for elements in targets for code in elements]
    counts = np.array([len(code) for code in codes], np.int32)
    return counts, np.array([tuple(f) for code in codes for f in code], _field)
