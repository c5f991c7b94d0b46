from collections.abc import Iterator

import ml_dtypes
import numpy as np

from ...formats import FP8, MXFP8
from .._checkpoint import Entry
from ._base import bits_of, check, floats, Source, to_quantized
from ._groups import group_index, is_ordered, scale_blocks


_dtypes = {"F8_E4M3": "e4m3", "F8_E5M2": "e5m2"}


def find_float8(source: Source) -> Iterator[Entry]:
    """Finds arrays of 8-bit floats in compressed-tensors: `weight`, and `weight_scale`
    for a matrix, each row, groups of a row, or blocks of rows and columns. Scales may
    be powers of two (E8M0). Other libraries call the scale `weight_scale_inv`."""
    for name, weight in source.tensors.items():
        scale = source.get(f"{name}_scale", *floats, "U8", "F8_E8M0")
        scale = scale or source.get(f"{name}_scale_inv", *floats, "F8_E8M0")
        if weight.kind not in _dtypes or scale is None:
            continue
        check(weight.ndim >= 2, f"{name!r} should have two axes", weight)
        *lead, k = weight.shape
        is_mx = scale.kind == "F8_E8M0" and scale.shape == (*lead, -(-k // 32))
        find = _mx if scale.kind == "U8" or is_mx else _scaled
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
    g_idx = group_index(source, name, weight.shape[-1])
    if is_ordered(g_idx, blocks.groups, blocks.size):
        raise ValueError(
            f"{name!r} has groups in another order, by {name + '_g_idx'!r}, for which "
            "this library has no format of 8-bit floats."
        )
    kind = "tensor" if blocks.height is None else "channel"
    # Powers of two need the exponents of float32.
    has_floats = scale.kind in floats
    scale_dtype = scale.dtype if has_floats else np.dtype(np.float32)
    dtype = scale.dtype if has_floats else source.dtype_or(ml_dtypes.bfloat16)
    format = FP8(_dtypes[weight.kind], blocks.size, kind, scale_dtype)

    def to_array():
        number = scale.read()
        number = number if has_floats else number.astype(np.float32)
        found = blocks.by_row(bits_of(number), weight.shape)
        # One scale for a matrix is stored once.
        found = found[..., :1, :] if blocks.height is None else found
        stored = {"codes": bits_of(weight.read()), "scale": found}
        return to_quantized(stored, format, weight.shape, dtype)

    sources = tuple(t for t in (weight, scale, g_idx) if t is not None)
    layout = "compressed-tensors"
    return Entry(name, weight.shape, dtype, format, layout, sources, to_array)
