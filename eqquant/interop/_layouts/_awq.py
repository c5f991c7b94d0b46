from collections.abc import Iterator

import numpy as np

from ...formats import Int4
from .._checkpoint import Entry
from ._base import as_bytes, bits_of, check, floats, Source, to_quantized, words
from ._groups import check_there, group_size
from ._registry import register_layout


# The column of each of the eight codes in a word, lowest bits first, and the inverse.
_columns = np.array([0, 2, 4, 6, 1, 3, 5, 7])
_codes = np.argsort(_columns)


def find_awq(source: Source) -> Iterator[Entry]:
    """Finds arrays for AWQ's GEMM kernels: 4-bit `qweight` and `qzeros`, with eight
    columns of a row in each word, and `scales`."""
    for name, qweight in source.tensors.items():
        prefix = name.removesuffix("qweight")
        scales = source.get(f"{prefix}scales", *floats)
        if prefix == name or qweight.kind not in words or scales is None:
            continue
        if min(qweight.ndim, scales.ndim) < 2 or qweight.shape[-1] == scales.shape[-1]:
            continue
        yield _entry(source, prefix, qweight, scales)


def _entry(source, prefix, qweight, scales):
    name = f"{prefix}weight"
    qzeros = source.get(f"{prefix}qzeros", *words)
    *lead, k, _ = qweight.shape
    *_, groups, n = scales.shape
    check(
        qweight.shape == (*lead, k, n // 8)
        and scales.shape == (*lead, groups, n // 8 * 8)
        and (qzeros is None or qzeros.shape == (*lead, groups, n // 8)),
        f"{name!r} should have eight columns in each word, as in AWQ for its GEMM "
        "kernels (version 'gemm', the only one that can be read), but not in GPTQ",
        *(qweight, qzeros, scales),
    )
    has_zeros = source.config.get("zero_point") is True
    said = "'zero_point': true" if has_zeros else ""
    check_there(qzeros, name, f"{prefix}qzeros", said)
    size = group_size(name, [source.config.get("group_size")], k, groups)
    format = Int4(size, symmetric=False, scale_dtype=scales.dtype)

    def to_array():
        codes = _unpacked(qweight.read()).swapaxes(-1, -2)
        if qzeros is None:
            zeros = np.full(scales.shape, 8, np.uint8)
        else:
            zeros = _unpacked(qzeros.read())
        pairs = np.zeros((*lead, n, -(-k // 2), 2), np.uint8)
        pairs[..., 0], pairs[..., : k // 2, 1] = codes[..., ::2], codes[..., 1::2]
        stored = {
            "codes": pairs[..., 0] | pairs[..., 1] << np.uint8(4),
            "scale": bits_of(scales.read()).swapaxes(-1, -2),
            "zero_point": zeros.swapaxes(-1, -2),
        }
        return to_quantized(stored, format, (*lead, n, k), scales.dtype)

    sources = tuple(t for t in (qweight, qzeros, scales) if t is not None)
    return Entry(name, (*lead, n, k), scales.dtype, format, "awq", sources, to_array)


def _unpacked(x):
    found = as_bytes(x)
    nibbles = np.stack([found & np.uint8(15), found >> np.uint8(4)], axis=-1)
    *lead, n = x.shape
    return nibbles.reshape(*lead, n, 8)[..., _codes].reshape(*lead, n * 8)


register_layout("awq", find_awq, hints={"group_size": int})
