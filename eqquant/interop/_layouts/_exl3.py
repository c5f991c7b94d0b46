from collections.abc import Iterator
from typing import Any

import numpy as np

from ...formats import AbstractFormat, EXL3
from .._checkpoint import Entry
from .._containers import Part
from ._base import bits_of, check, Source, to_quantized
from ._registry import register_layout
from ._rows import Rows


# The multipliers of the codes. The tensors that hold them tell which code it is.
_multipliers = {"mcg": 0xCBAC1FED, "mul1": 0x83DCD12D}


def find_exl3(source: Source) -> Iterator[Entry]:
    """Finds arrays of exllamav3: `trellis`, `(k / 16, n / 16, 16 * bits)`, whose 16-bit
    words are the codes of tiles; `suh` and `svh`, the signs times scales of the inputs
    and outputs, or `su` and `sv`, the signs alone as bits, in older files; and `mcg` or
    `mul1`, by which code the numbers are computed."""
    for name, trellis in source.tensors.items():
        prefix = name.removesuffix("trellis")
        if prefix == name or prefix and not prefix.endswith("."):
            continue
        signs = [_signs(source, prefix, axis) for axis in "uv"]
        if trellis.kind == "I16" and None not in signs:
            yield _entry(source, prefix, trellis, *signs)


def _signs(source, prefix, axis):
    scaled = source.get(f"{prefix}s{axis}h", "F16")
    return scaled or source.get(f"{prefix}s{axis}", "I16")


def _entry(source, prefix, trellis, su, sv):
    name = f"{prefix}weight"
    markers = {
        code: source.need(f"{prefix}{code}", name, "I32", "U32")
        for code in _multipliers
        if f"{prefix}{code}" in source.tensors
    }
    check(
        trellis.ndim == 3
        and trellis.shape[0] % 8 == trellis.shape[1] % 8 == 0
        and _number(su) == 16 * trellis.shape[0]
        and _number(sv) == 16 * trellis.shape[1],
        f"{name!r} should have a sign for each input and output, and 16 of both in "
        "each tile, of which there are a multiple of 8 along both axes",
        *(trellis, su, sv),
    )
    tiles, others, words = trellis.shape
    if len(markers) > 1:
        both = " and ".join(map(repr, markers))
        raise ValueError(f"{name!r} should have one code. Got both {both}.")
    code: Any = next(iter(markers), "3inst")
    try:
        format = EXL3(words / 16, code)
    except ValueError as e:
        raise ValueError(
            f"{trellis.name!r} should have 16 words for each bit of a code. Got "
            f"{trellis.shape}, with the code {code!r}: {e}"
        ) from e
    shape, dtype = (16 * others, 16 * tiles), source.dtype_or(np.float16)

    def to_array():
        for marker in markers.values():
            found = int(marker.read().view(np.uint32).item())
            if found != _multipliers[code]:
                raise ValueError(
                    f"{marker.name!r} should be {_multipliers[code]:#x}, by which the "
                    f"code {code!r} of exllamav3 multiplies. Got {found:#x}."
                )
        # Each row gets a sixteenth of the bytes of its tiles.
        codes = trellis.read().view(np.uint8).reshape(tiles, others, 16, words // 8)
        stored = {
            "codes": codes.transpose(1, 2, 0, 3).reshape(shape[0], tiles * words // 8),
            "suh": _scales(su)[None],
            "svh": _scales(sv)[:, None],
        }
        return to_quantized(stored, format, shape, dtype)

    sources = (trellis, su, sv, *markers.values())
    return Entry(name, shape, dtype, format, "exl3", sources, to_array)


def _number(signs):
    (size,) = signs.shape if signs.ndim == 1 else (-1,)
    return size if signs.kind == "F16" else 16 * size


def _scales(signs):
    """Returns the bits of float16 numbers. In older files, set bits are signs of -1,
    the lowest bit of a word first."""
    found = signs.read()
    if found.dtype == np.float16:
        return bits_of(found)
    negative = np.unpackbits(found.view(np.uint8), bitorder="little").astype(bool)
    return bits_of(np.where(negative, np.float16(-1), np.float16(1)))


def exl3_parts(name: str, x: Any) -> dict[str, Part]:
    """Returns the tensors of an array for exllamav3. Raises a `ValueError` if it is not
    a matrix in `EXL3`."""
    rows = Rows(name, x, "exllamav3")
    format = rows.format
    if not isinstance(format, EXL3):
        raise rows.refused("it has `EXL3(bits, code)` alone, of EXL3 files")
    if len(rows.shape) != 2:
        raise rows.refused(f"it should be a matrix; the shape is {rows.shape}")
    n, k = rows.shape
    words = int(16 * format.bits)

    def trellis():
        codes = rows.stored("codes").reshape(n // 16, 16, k // 16, words // 8)
        codes = np.ascontiguousarray(codes.transpose(2, 0, 1, 3))
        return codes.reshape(k // 16, n // 16, words * 2).view(np.int16)

    half = lambda key: rows.stored(key).reshape(-1).view(np.float16)
    parts = {
        f"{rows.prefix}suh": Part("F16", (k,), lambda: half("suh")),
        f"{rows.prefix}svh": Part("F16", (n,), lambda: half("svh")),
        f"{rows.prefix}trellis": Part("I16", (k // 16, n // 16, words), trellis),
    }
    if format.code in _multipliers:
        marker = np.array(_multipliers[format.code], np.uint32).view(np.int32)
        parts[f"{rows.prefix}{format.code}"] = Part("I32", (), lambda: marker)
    return parts


def exl3_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """Returns the configuration of a model, given the formats of its arrays by their
    names."""
    bits = {name: format.bits for name, format in formats.items()}
    head = [x for name, x in bits.items() if name.startswith("lm_head.")]
    others = [x for name, x in bits.items() if not name.startswith("lm_head.")]
    if not bits:
        return {}
    body = others or head
    section = {"quant_method": "exl3", "bits": round(sum(body) / len(body), 2)}
    return {"quantization_config": section | {"head_bits": (head or body)[-1]}}


register_layout("exl3", find_exl3, parts=exl3_parts, config=exl3_config)
