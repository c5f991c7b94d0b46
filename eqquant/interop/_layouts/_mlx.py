from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ...formats import AbstractFormat, Int, MXFP4, MXFP8, NVFP4
from .._checkpoint import Entry
from .._containers import Part
from ._base import as_bytes, bits_of, check, floats, Source, to_quantized
from ._registry import register_layout
from ._rows import kind_of, Rows


_bits = (1, 2, 3, 4, 5, 6, 8)
_sizes = (32, 64, 128)
# For each mode, the bits of a code, and the number of codes per scale.
_modes = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def find_mlx(source: Source) -> Iterator[Entry]:
    """Finds arrays of MLX: `weight`, a stream of bits in 32-bit words for each row,
    with `scales` and `biases`; or, in the floating-point modes, with 8-bit `scales`."""
    for name, weight in source.tensors.items():
        prefix = name.removesuffix("weight")
        scales = source.get(f"{prefix}scales", *floats, "U8")
        if prefix == name or weight.kind != "U32" or scales is None:
            continue
        biases = source.get(f"{prefix}biases", *floats)
        if scales.kind == "U8":
            yield _floating(source, name, weight, scales)
        elif biases is not None:
            yield _affine(source, name, weight, scales, biases)


def _affine(source, name, weight, scales, biases):
    *lead, groups = scales.shape
    check(
        scales.ndim >= 2
        and weight.shape[:-1] == scales.shape[:-1]
        and (scales.shape, scales.kind) == (biases.shape, biases.kind),
        f"{name!r} should have as many scales as biases in each row",
        *(weight, scales, biases),
    )
    bits, size = _bits_and_size(source, name, 32 * weight.shape[-1], groups)
    format = Int(bits, size, "minimum", scale_dtype=scales.dtype)
    shape = (*lead, groups * size)

    def to_array():
        stored = {
            "codes": as_bytes(weight.read()),
            "scale": bits_of(scales.read()),
            "minimum": bits_of(biases.read()),
        }
        return to_quantized(stored, format, shape, scales.dtype)

    sources = (weight, scales, biases)
    return Entry(name, shape, scales.dtype, format, "mlx", sources, to_array)


def _bits_and_size(source: Source, name: str, row: int, groups: int) -> tuple[int, int]:
    config = _config(source, name)
    bits: Any = config.get("bits")
    size: Any = config.get("group_size")
    if groups == 0 or row % groups != 0:
        raise ValueError(f"{name!r} has {groups} scales, for rows of {row} bits.")
    product = row // groups
    found = [(b, s) for s in _sizes for b in _bits if b * s == product]
    fitting = [(b, s) for b, s in found if bits in (None, b) and size in (None, s)]
    # MLX's default is 4 bits in groups of 64.
    if bits is None and size is None and (4, 64) in found:
        fitting = [(4, 64)]
    # A layer may differ from the rest of the model: shapes may be enough.
    fitting = fitting or found
    if len(fitting) != 1:
        raise ValueError(
            f"{name!r} has {product} bits per scale, which fit the (bits, group_size) "
            f"{found}. The choice has to be in a 'config.json', or in the hints `bits` "
            f"and `group_size`. Got {bits!r} and {size!r}."
        )
    if fitting[0][0] == 1:
        raise ValueError(f"{name!r} has 1-bit codes, which this library cannot read.")
    return fitting[0]


def _floating(source, name, weight, scales):
    *lead, groups = scales.shape
    row = 32 * weight.shape[-1] if weight.ndim else 0
    mode = _config(source, name).get("mode")
    whole = source.tensors.get(f"{name.removesuffix('weight')}global_scale")
    modes = [m for m, (bits, size) in _modes.items() if row == groups * bits * size]
    check(
        scales.ndim >= 2
        and weight.shape[:-1] == scales.shape[:-1]
        and len(modes) > 0
        and (mode in modes or mode not in [*_modes])
        and whole is None,
        f"{name!r} should have the scales of one of {', '.join(_modes)}, and no other",
        *(weight, scales, whole),
    )
    mode = modes[0]
    format = {"mxfp4": MXFP4(), "mxfp8": MXFP8("e4m3"), "nvfp4": NVFP4()}[mode]
    _, size = _modes[mode]
    shape = (*lead, groups * size)
    dtype = source.dtype_or(ml_dtypes.bfloat16)

    def to_array():
        stored = {"codes": as_bytes(weight.read()), "scale": scales.read()}
        if mode == "nvfp4":
            one = np.ones((*lead[:-1], 1, 1), np.float32)
            stored["global_scale"] = bits_of(one)
        return to_quantized(stored, format, shape, dtype)

    return Entry(name, shape, dtype, format, "mlx", (weight, scales), to_array)


def _config(source, name):
    # Returns the configuration of the layer, or else of the model.
    own = source.config.get(name.removesuffix(".weight"))
    return own if isinstance(own, dict) else source.config


def mlx_parts(name: str, x: Any) -> dict[str, Part]:
    """Returns the tensors of an array in MLX. Raises a `ValueError` if MLX has no such
    format."""
    rows = Rows(name, x, "MLX")
    config = mlx_scheme(rows.format)
    if config is None:
        raise rows.refused(
            "it has `Int(bits, block_size, offset='minimum')` of 2, 3, 4, 5, 6 or 8 "
            "bits in blocks of 32, 64 or 128, `MXFP4` and `MXFP8()`"
        )
    bits, size = config["bits"], config["group_size"]
    if rows.k % size != 0:
        raise rows.refused(f"rows should have a multiple of {size} numbers")
    *lead, k = rows.shape
    words, scales = (*lead, k * bits // 32), (*lead, k // size)
    parts = {name: Part("U32", words, lambda: rows.stored("codes"))}
    if config["mode"] != "affine":
        parts[f"{rows.prefix}scales"] = Part("U8", scales, lambda: rows.stored("scale"))
        return parts
    kind = kind_of(name, rows.format.scale_dtype)
    parts[f"{rows.prefix}scales"] = Part(kind, scales, lambda: rows.stored("scale"))
    parts[f"{rows.prefix}biases"] = Part(kind, scales, lambda: rows.stored("minimum"))
    return parts


def mlx_scheme(format: AbstractFormat) -> dict[str, Any] | None:
    """Returns the entries for a format in a configuration, or `None` if MLX has no such
    format."""
    if isinstance(format, Int) and format.offset == "minimum" and not format.ordered:
        bits, size = format.bits, format.block_size
        if bits in (2, 3, 4, 5, 6, 8) and size in (32, 64, 128):
            return {"group_size": size, "bits": bits, "mode": "affine"}
    if isinstance(format, MXFP4):
        return {"group_size": 32, "bits": 4, "mode": "mxfp4"}
    if format == MXFP8("e4m3"):
        return {"group_size": 32, "bits": 8, "mode": "mxfp8"}
    return None


def mlx_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """Returns the configuration of a model, given the formats of its arrays by their
    names."""
    if not formats:
        return {}
    each = {name.removesuffix(".weight"): mlx_scheme(f) for name, f in formats.items()}
    schemes = list(each.values())
    # The most common scheme becomes the model's; other layers have their own entries.
    usual = max(schemes, key=schemes.count)
    others = {name: scheme for name, scheme in each.items() if scheme != usual}
    return {"quantization": (usual or {}) | others}


register_layout(
    "mlx",
    find_mlx,
    parts=mlx_parts,
    config=mlx_config,
    metadata={"format": "mlx"},
    hints={"bits": int, "group_size": int},
    section="quantization",
)
