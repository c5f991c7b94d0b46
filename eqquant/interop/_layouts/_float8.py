from collections.abc import Iterator

import ml_dtypes

from ...formats import FP8, MXFP8
from .._checkpoint import Entry
from ._base import bits_of, check, floats, Source, to_quantized
from ._groups import scale_blocks


_dtypes = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}


def find_float8(source: Source) -> Iterator[Entry]:
    """Arrays of 8-bit floats in compressed-tensors: `weight`, and `weight_scale` for a
    matrix, each row, groups of a row, or blocks of rows and columns. Other libraries
    call the scale `weight_scale_inv`."""
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
    blocks = scale_blocks(source, name, weight, scale)
    kind = "tensor" if blocks.height is None else "channel"
    format = FP8(_dtypes[weight.kind], blocks.size, kind, scale.dtype)

    def to_array():
        found = blocks.by_row(bits_of(scale.read()), weight.shape)
        # One scale for a matrix is stored once.
        found = found[..., :1, :] if blocks.height is None else found
        stored = {"codes": bits_of(weight.read()), "scale": found}
        return to_quantized(stored, format, weight.shape, scale.dtype)

    layout, sources = "compressed-tensors", (weight, scale)
    return Entry(name, weight.shape, scale.dtype, format, layout, sources, to_array)
