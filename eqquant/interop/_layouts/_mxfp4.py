from collections.abc import Iterator

import ml_dtypes
import numpy as np

from ...formats import MXFP4
from .._checkpoint import Entry
from ._base import check, Source, to_quantized
from ._registry import register_layout


def find_mxfp4(source: Source) -> Iterator[Entry]:
    """Finds arrays of gpt-oss: `*_blocks` of 32 codes in 16 bytes, the first in the low
    bits, and `*_scales`. Each expert is `(n, k)` in the file, and `(k, n)` here, as in
    Hugging Face's library, contracted along `k`."""
    for name, blocks in source.tensors.items():
        base = name.removesuffix("_blocks")
        scales = source.get(f"{base}_scales", "U8")
        if base == name or blocks.kind != "U8" or scales is None:
            continue
        yield _entry(source, base, blocks, scales)


def _entry(source, name, blocks, scales):
    check(
        scales.ndim >= 2 and blocks.shape == (*scales.shape, 16),
        f"{name!r} should have 16 bytes for each scale",
        *(blocks, scales),
    )
    *lead, n, groups = scales.shape
    format = MXFP4()
    dtype = np.dtype(ml_dtypes.bfloat16)

    def to_array():
        codes = blocks.read().reshape(*lead, n, groups * 16)
        stored = {"codes": codes, "scale": scales.read()}
        shape = (*lead, n, groups * 32)
        return to_quantized(stored, format, shape, dtype, transposed=True)

    shape = (*lead, groups * 32, n)
    return Entry(name, shape, dtype, format, "mxfp4", (blocks, scales), to_array, -2)


register_layout("mxfp4", find_mxfp4)
