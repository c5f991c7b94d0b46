from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

from ...formats import Int, MXFP4, MXFP8, NVFP4
from .._checkpoint import Entry
from ._base import as_bytes, bits_of, check, floats, Source, to_quantized


_bits = (1, 2, 3, 4, 5, 6, 8)
_sizes = (32, 64, 128)
# By the name of the mode: how many bits a code has, and how many of them a scale.
_modes = {"mxfp4": (4, 32), "mxfp8": (8, 32), "nvfp4": (4, 16)}


def find_mlx(source: Source) -> Iterator[Entry]:
    """Arrays as MLX writes them: `weight` in words of 32 bits, which are one stream of
    codes for each row, with `scales` and `biases`; or with scales of 8 bits, in the
    modes for small floating-point numbers."""
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
    # What MLX takes if it is not told.
    if bits is None and size is None and (4, 64) in found:
        fitting = [(4, 64)]
    # Of a layer that is not as the rest of the model, shapes may be enough.
    fitting = fitting or found
    if len(fitting) != 1:
        raise ValueError(
            f"{name!r} has {product} bits to a scale. In what groups that is has to be "
            f"said by a 'config.json', or to `read_mlx`. Got bits={bits!r} and "
            f"group_size={size!r}, of {found}."
        )
    if fitting[0][0] == 1:
        raise ValueError(f"{name!r} is of 1 bit, of which this library has no format.")
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
    # Of one layer, or else of all.
    own = source.config.get(name.removesuffix(".weight"))
    return own if isinstance(own, dict) else source.config
