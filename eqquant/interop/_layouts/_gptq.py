from collections.abc import Iterator
from typing import Any

import numpy as np

from ...formats import AbstractFormat, AbstractGrid, Int, Int4
from .._checkpoint import Entry
from .._containers import Part
from ._base import (
    as_bytes,
    as_words,
    bits_of,
    check,
    floats,
    repacked,
    Source,
    to_quantized,
    unpack,
    words,
)
from ._groups import check_there, group_size, has_zeros, is_ordered
from ._registry import register_layout
from ._rows import kind_of, Rows


def find_gptq(source: Source) -> Iterator[Entry]:
    """Finds arrays of GPTQ: `qweight`, `qzeros`, `scales` and `g_idx`.

    Codes are a stream of bits along the contracted axis, and zero-points along the
    other axis. Version 1 of the layout (`"gptq"`) stores zero-points minus one, modulo
    the number of codes; version 2 (`"gptq_v2"`) stores them unchanged. A symmetric
    array whose zero-points are all half the number of codes is of version 2, whatever
    its configuration says. `g_idx` is the group of each position; without it, groups
    are in order.
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
        f"{name!r} should have a zero-point for each scale, in codes of {bits} bits",
        *(qweight, qzeros, scales, g_idx),
    )
    is_asymmetric = "'sym': false" if source.config.get("sym") is False else ""
    check_there(qzeros, name, f"{prefix}qzeros", is_asymmetric)
    has_order = "'desc_act': true" if source.config.get("desc_act") is True else ""
    check_there(g_idx, name, f"{prefix}g_idx", has_order)
    size = group_size(name, [source.config.get("group_size")], k, groups)
    ordered = is_ordered(g_idx, groups, size)
    if ordered or bits != 4:
        format = Int(bits, size, "zero_point", ordered, scales.dtype)
    else:
        format = Int4(size, symmetric=False, scale_dtype=scales.dtype)
    version = 2 if source.config.get("checkpoint_format") == "gptq_v2" else 1
    one = np.uint8(2 - source.hints.get("version", version))
    # Some files of version 2 claim to be of version 1.
    may_be_wrong = source.config.get("sym") is True and "version" not in source.hints

    def to_array():
        # Transpose whole words, so that the bits of a row are one stream of bytes.
        codes = as_bytes(qweight.read().swapaxes(-1, -2))
        if qzeros is None:
            zeros = np.full(scales.shape, 2 ** (bits - 1), np.uint8)
        else:
            zeros = unpack(qzeros.read(), bits, n)
            if not (may_be_wrong and np.all(zeros == 2 ** (bits - 1))):
                # A zero-point of zero was stored as the largest code.
                zeros = (zeros + one) & np.uint8(2**bits - 1)
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
    # Arrays may differ from the configuration, so shapes take precedence.
    configured = source.config.get("bits")
    *_, words, n = qweight.shape
    fitting = [
        bits
        for bits in (2, 3, 4, 8)
        if (qzeros is None or qzeros.shape[-1:] == (-(-n * bits // 32),))
        and (
            g_idx is None
            or g_idx.ndim == 0
            or words == -(-g_idx.shape[-1] * bits // 32)
        )
    ]
    if len(fitting) != 1 and configured in fitting and type(configured) is int:
        return configured
    if len(fitting) != 1:
        raise ValueError(
            f"{name!r} should have codes of 2, 3, 4 or 8 bits. Its shapes fit "
            f"{fitting or 'none of these'}, and the hint or configuration `bits` is "
            f"{configured!r}."
        )
    return fitting[0]


def gptq_parts(name: str, x: Any) -> dict[str, Part]:
    """Returns the tensors of an array in version 2 of GPTQ's layout. Raises a
    `ValueError` if GPTQ has no such format."""
    rows = Rows(name, x, "GPTQ")
    format = rows.format
    bits = gptq_bits(format)
    if bits is None:
        raise rows.refused(
            "it has `Int4(block_size)` and `Int(bits, block_size)` of 2, 3, 4 or 8 "
            "bits, with or without zero-points, and scales of float16 or bfloat16 "
            "(`scale_dtype`)"
        )
    if len(rows.shape) != 2:
        raise rows.refused(f"it should be a matrix; the shape is {rows.shape}")
    n, k = rows.shape
    if n * bits % 32 != 0 or k * bits % 32 != 0:
        raise rows.refused(
            f"its codes should fill words of 32 bits, along rows and columns; the "
            f"shape is {rows.shape}"
        )
    groups = rows.groups

    def qweight():
        codes = rows.stored("codes")[:, : k * bits // 8]
        return as_words(codes).swapaxes(0, 1)

    def qzeros():
        if not has_zeros(format):
            return repacked(np.full((groups, n), 2 ** (bits - 1), np.uint8), bits)
        zeros = rows.stored("zero_point").swapaxes(0, 1)
        if zeros.max(initial=0) >= 2**bits:
            raise rows.refused(f"it has zero-points of more than {bits} bits")
        return repacked(np.ascontiguousarray(zeros, np.uint8), bits)

    def g_idx():
        if format.ordered:
            return rows.stored("block")[0]
        return np.arange(k, dtype=np.int32) // np.int32(format.block_size or max(k, 1))

    scale = kind_of(name, format.scale_dtype)
    return {
        f"{rows.prefix}qweight": Part("I32", (k * bits // 32, n), qweight),
        f"{rows.prefix}qzeros": Part("I32", (groups, n * bits // 32), qzeros),
        f"{rows.prefix}scales": Part(
            scale, (groups, n), lambda: rows.stored("scale").swapaxes(0, 1)
        ),
        f"{rows.prefix}g_idx": Part("I32", (k,), g_idx),
    }


def gptq_bits(format: AbstractFormat) -> int | None:
    """Returns the number of bits of a code, or `None` if GPTQ has no such format."""
    if not isinstance(format, Int | Int4) or format.scale_dtype.itemsize != 2:
        return None
    if format.offset == "minimum":
        return None
    bits = int(format.bits)
    return bits if bits in (2, 3, 4, 8) else None


def gptq_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """Returns the configuration of a model, given the formats of its arrays by their
    names. Raises a `ValueError` if their bits or block sizes differ."""
    if not formats:
        return {}
    first, format = next(iter(formats.items()))
    for name, other in formats.items():
        same = (gptq_bits(other), other.block_size) == (
            gptq_bits(format),
            format.block_size,
        )
        if not same:
            raise ValueError(
                "All arrays for GPTQ should have the same bits and block size. Got "
                f"{format} for {first!r}, and {other} for {name!r}."
            )
    each = list(formats.values())
    return {
        "quantization_config": {
            "quant_method": "gptq",
            "bits": gptq_bits(format),
            "group_size": format.block_size or -1,
            "sym": not any(map(has_zeros, each)),
            "desc_act": any(isinstance(f, AbstractGrid) and f.ordered for f in each),
            "checkpoint_format": "gptq_v2",
        }
    }


register_layout(
    "gptq",
    find_gptq,
    parts=gptq_parts,
    config=gptq_config,
    hints={"version": (1, 2), "bits": int, "group_size": int},
)
