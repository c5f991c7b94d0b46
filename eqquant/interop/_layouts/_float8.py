import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from ...formats import FP8, MXFP8
from .._checkpoint import Entry
from ._base import bits_of, check, floats, Source, to_quantized
from ._groups import group_size
from ._scheme import said


_dtypes = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}


def find_float8(source: Source) -> Iterator[Entry]:
    """Arrays of 8-bit floating-point numbers, as compressed-tensors writes them:
    `weight`, and `weight_scale` for all of it, each row, groups of a row, or blocks of
    rows and columns. Others write `weight_scale_inv`, which is the same by another
    name."""
    for name, weight in source.tensors.items():
        scale = source.get(f"{name}_scale", *floats, "U8", "F8_E8M0")
        scale = scale or source.get(f"{name}_scale_inv", *floats)
        if weight.kind not in _dtypes or scale is None:
            continue
        check(weight.ndim >= 2, f"{name!r} should have two axes", weight)
        find = _scaled if scale.kind in floats else _mx
        yield find(source, name, weight, scale)


def _mx(source, name, weight, scale):
    *lead, k = weight.shape
    expected = (*lead, -(-k // 32))
    check(scale.shape == expected, f"{name!r} needs scales {expected}", weight, scale)
    format = MXFP8(_dtypes[weight.kind])
    dtype = source.dtype_or(ml_dtypes.bfloat16)

    def to_array():
        stored = {"codes": bits_of(weight.read()), "scale": bits_of(scale.read())}
        return to_quantized(stored, format, weight.shape, dtype)

    layout, sources = "compressed-tensors", (weight, scale)
    return Entry(name, weight.shape, dtype, format, layout, sources, to_array)


def _scaled(source, name, weight, scale):
    n = weight.shape[-2]
    blocks = _blocks(source, name, weight, scale)
    kind = "tensor" if blocks.height is None else "channel"
    format = FP8(_dtypes[weight.kind], blocks.size, kind, scale.dtype)

    def to_array():
        found = bits_of(scale.read())
        if blocks.height is None:
            # One of all matrices, or of each.
            lead = weight.shape[:-2]
            found = found.reshape(() if found.size == 1 else (*lead, 1, 1))
            found = np.broadcast_to(found, (*lead, 1, 1))
        else:
            found = found.reshape(*weight.shape[:-2], -1, blocks.groups)
            found = np.repeat(found, blocks.height, axis=-2)[..., :n, :]
        stored = {"codes": bits_of(weight.read()), "scale": found}
        return to_quantized(stored, format, weight.shape, scale.dtype)

    layout, sources = "compressed-tensors", (weight, scale)
    return Entry(name, weight.shape, scale.dtype, format, layout, sources, to_array)


class _Blocks(NamedTuple):
    # How many rows share a scale. `None` if all do.
    height: int | None
    # How many columns. `None` if all do.
    size: int | None
    # How many scales there are to a row.
    groups: int


def _blocks(source, name, weight, scale):
    *lead, n, k = weight.shape
    if math.prod(scale.shape) == 1 or scale.shape in ((*lead,), (*lead, 1, 1)):
        return _Blocks(None, None, 1)
    if scale.shape in ((*lead, n), (*lead, n, 1)):
        return _Blocks(1, None, 1)
    check(
        scale.ndim == weight.ndim and scale.shape[:-2] == (*lead,),
        f"{name!r} should have a scale, or scales of rows, groups or blocks",
        *(weight, scale),
    )
    rows, groups = scale.shape[-2:]
    if rows == n:
        return _Blocks(
            1, group_size(name, said(source, "group_size"), k, groups), groups
        )
    known = [*said(source, "weight_block_size"), *said(source, "block_structure")]
    for height, width in [*filter(_is_block, known), (128, 128)]:
        if (-(-n // height), -(-k // width)) == (rows, groups):
            return _Blocks(height, None if groups == 1 else width, groups)
    raise ValueError(
        f"{name!r} should have scales of blocks, of a size that is said by a "
        f"'config.json'. Got {scale.name!r} {scale.shape}, for shape {weight.shape}."
    )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )
