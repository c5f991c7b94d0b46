from collections.abc import Iterator

import numpy as np

from ...formats import Int, Int4
from .._checkpoint import Entry
from ._base import as_bytes, bits_of, check, floats, Source, to_quantized, unpack, words
from ._groups import group_size, is_ordered


def find_gptq(source: Source) -> Iterator[Entry]:
    """Arrays as GPTQ writes them: `qweight`, `qzeros`, `scales` and `g_idx`.

    Codes go down the contracted axis as one stream of bits, and zero-points along the
    other. Of these, version 1 of the layout (`"gptq"`) has one less than they are, and
    version 2 (`"gptq_v2"`) has them as they are. `g_idx` is the group of each position;
    without it, they lie in order.
    """
    for name, qweight in source.tensors.items():
        prefix = name.removesuffix("qweight")
        scales = source.get(f"{prefix}scales", *floats)
        if prefix == name or qweight.kind not in words or scales is None:
            continue
        if min(qweight.ndim, scales.ndim) < 2 or qweight.shape[-1] != scales.shape[-1]:
            continue
        yield _entry(source, prefix, qweight, scales)


def _entry(source, prefix, qweight, scales):
    name = f"{prefix}weight"
    qzeros = source.get(f"{prefix}qzeros", *words)
    g_idx = source.get(f"{prefix}g_idx", "I32", "I64")
    *lead, groups, n = scales.shape
    bits = _bits(source, name, qweight, qzeros, g_idx)
    k = qweight.shape[-2] * 32 // bits
    check(
        qweight.shape == (*lead, k * bits // 32, n)
        and (qzeros is None or qzeros.shape == (*lead, groups, -(-n * bits // 32)))
        and (g_idx is None or g_idx.shape == (*lead, k)),
        f"{name!r} should have zero-points like its scales, for codes of {bits} bits",
        *(qweight, qzeros, scales, g_idx),
    )
    size = group_size(name, [source.config.get("group_size")], k, groups)
    ordered = is_ordered(g_idx, groups, size)
    if ordered or bits != 4:
        format = Int(bits, size, "zero_point", ordered, scales.dtype)
    else:
        format = Int4(size, symmetric=False, scale_dtype=scales.dtype)
    one = 0 if source.config.get("checkpoint_format") == "gptq_v2" else 1

    def to_array():
        # As words, so that the bits of each row become one stream of bytes.
        codes = as_bytes(qweight.read().swapaxes(-1, -2))
        if qzeros is None:
            zeros = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
        else:
            # Of 8 bits, one more than the largest takes more.
            wide = np.uint16 if bits == 8 and one else np.uint8
            zeros = unpack(qzeros.read(), bits, n).astype(wide) + wide(one)
        stored = {
            "codes": codes,
            "scale": bits_of(scales.read()).swapaxes(-1, -2),
            "zero_point": zeros.swapaxes(-1, -2),
        }
        if ordered and g_idx is not None:
            stored["block"] = g_idx.read().astype(np.int32)[..., None, :]
        return to_quantized(stored, format, (*lead, n, k), scales.dtype)

    sources = tuple(t for t in (qweight, qzeros, scales, g_idx) if t is not None)
    return Entry(name, (*lead, n, k), scales.dtype, format, "gptq", sources, to_array)


def _bits(source, name, qweight, qzeros, g_idx):
    # It may differ from one array to another, so that shapes say more than words.
    said = source.config.get("bits")
    *_, words, n = qweight.shape
    fitting = [
        bits
        for bits in (2, 3, 4, 8)
        if (qzeros is None or qzeros.shape[-1] == -(-n * bits // 32))
        and (g_idx is None or words == -(-g_idx.shape[-1] * bits // 32))
    ]
    if len(fitting) != 1 and said in fitting and type(said) is int:
        return said
    if len(fitting) != 1:
        raise ValueError(
            f"{name!r} should have codes of 2, 3, 4 or 8 bits, as many as its other "
            f"tensors say or its configuration. Got {fitting or 'none that fit'} and "
            f"{said!r}."
        )
    return fitting[0]
