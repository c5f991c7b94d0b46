import functools as ft
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ...formats import AbstractFormat, FP8, Int, Int4, Int8, MXFP4, NVFP4
from .._checkpoint import Entry
from .._containers import check_shape, Part, RawTensor
from ._base import (
    as_bytes,
    as_words,
    bits_of,
    check,
    floats,
    packed_size,
    repacked,
    resized,
    Source,
    to_quantized,
    unpack,
)
from ._float8 import find_float8
from ._groups import (
    check_there,
    configured,
    group_index,
    group_size,
    has_zeros,
    is_ordered,
    says,
    scale_blocks,
)
from ._registry import register_layout
from ._rows import kind_of, Rows


_layout = "compressed-tensors"


def find_compressed(source: Source) -> Iterator[Entry]:
    """Finds arrays of compressed-tensors: `weight_packed` or `weight`, `weight_scale`,
    `weight_zero_point`. Packed integers are unsigned (half of their range is added), in
    one stream of bits for each row. 8-bit floats are in `_float8`."""
    for name, tensor in source.tensors.items():
        base = name.removesuffix("_packed")
        if base != name:
            scale = source.get(f"{base}_scale", *floats, "F8_E4M3", "U8", "F8_E8M0")
            if scale is not None and tensor.kind == "I32":
                yield _packed(source, base, tensor, scale)
            elif scale is not None and tensor.kind == "U8":
                yield _e2m1(source, base, tensor, scale)
        scale = source.get(f"{name}_scale", *floats)
        if name.endswith("weight") and tensor.kind == "I8" and scale is not None:
            yield _plain(source, name, tensor, scale)
    yield from find_float8(source)


def _packed(source, name, packed, scale):
    lengths = source.need(f"{name}_shape", name, "I64", "I32")
    zeros = _zeros(source, name, "I32", "I8")
    check(
        packed.ndim >= 2 and lengths.shape == (packed.ndim,),
        f"{name!r} should have packed rows, and a size for each axis",
        *(packed, lengths),
    )
    shape = tuple(map(int, lengths.read()))
    *lead, n, k = shape
    check_shape(name, shape)
    g_idx = group_index(source, name, k)
    bits = _bits(source, name, packed.shape[-1], k)
    groups = _number_of_groups(name, scale, (*lead, n))
    packed_zeros = zeros is not None and zeros.kind == "I32"
    per_group = _words(n, bits) if packed_zeros else n
    check(
        packed.shape[:-1] == (*lead, n)
        and (
            zeros is None
            or zeros.shape == (*lead, per_group, groups)
            # A single zero-point is not packed.
            or zeros.shape == scale.shape == (1,)
            and not packed_zeros
        ),
        f"{name!r} should have shape {shape}, in codes of {bits} bits",
        *(packed, scale, zeros),
    )
    size = group_size(name, configured(source, "group_size"), k, groups)
    ordered = is_ordered(g_idx, groups, size)
    if ordered or bits != 4:
        offset = None if zeros is None else "zero_point"
        format = Int(bits, size, offset, ordered, scale.dtype)
    else:
        format = Int4(size, symmetric=zeros is None, scale_dtype=scale.dtype)

    def to_array():
        # Rows in files are padded to whole words.
        codes = resized(as_bytes(packed.read()), packed_size(k, bits))
        stored = {
            "codes": codes,
            "scale": _spread(bits_of(scale.read()), (*lead, n, groups)),
        }
        if zeros is not None and packed_zeros:
            # Packed along columns.
            found = unpack(zeros.read().swapaxes(-1, -2), bits, n)
            stored["zero_point"] = found.swapaxes(-1, -2)
        elif zeros is not None:
            half = np.uint8(2 ** (bits - 1))
            found = zeros.read().view(np.uint8) + half
            stored["zero_point"] = _spread(found, (*lead, n, groups))
        if ordered and g_idx is not None:
            stored["block"] = _of_all(g_idx, shape)
        return to_quantized(stored, format, shape, scale.dtype)

    sources = tuple(t for t in (packed, scale, lengths, zeros, g_idx) if t is not None)
    return Entry(name, shape, scale.dtype, format, _layout, sources, to_array)


def _plain(source, name, weight, scale):
    zeros = _zeros(source, name, "I8")
    check(weight.ndim >= 2, f"{name!r} should have two axes", weight)
    check(
        zeros is None or zeros.shape == scale.shape,
        f"{name!r} should have a zero-point for each scale",
        *(scale, zeros),
    )
    blocks = scale_blocks(source, name, weight, scale)
    g_idx = group_index(source, name, weight.shape[-1])
    ordered = is_ordered(g_idx, blocks.groups, blocks.size)
    offset = None if zeros is None else "zero_point"
    if offset is None and not ordered:
        format = Int8(blocks.size, scale.dtype)
    else:
        format = Int(8, blocks.size, offset, ordered, scale.dtype)

    def to_array():
        found = blocks.by_row(bits_of(scale.read()), weight.shape)
        stored = {"codes": weight.read(), "scale": found}
        half = np.uint8(128)
        if isinstance(format, Int):
            stored["codes"] = stored["codes"].view(np.uint8) + half
        if zeros is not None:
            zero = zeros.read().view(np.uint8) + half
            stored["zero_point"] = blocks.by_row(zero, weight.shape)
        if ordered and g_idx is not None:
            stored["block"] = _of_all(g_idx, weight.shape)
        return to_quantized(stored, format, weight.shape, scale.dtype)

    sources = tuple(t for t in (weight, scale, zeros, g_idx) if t is not None)
    return Entry(name, weight.shape, scale.dtype, format, _layout, sources, to_array)


def _zeros(source, name, *kinds):
    zeros = source.get(f"{name}_zero_point", *kinds)
    said = says(source, "symmetric", False)
    check_there(zeros, name, f"{name}_zero_point", said)
    return zeros


def _of_all(g_idx, shape):
    # Repeats the groups for all matrices of a stack.
    *lead, _, k = shape
    return np.broadcast_to(g_idx.read().astype(np.int32), (*lead, 1, k))


def _e2m1(source, name, packed, scale):
    is_nv, of_all = scale.kind == "F8_E4M3", f"{name}_global_scale"
    whole = source.need(of_all, name, "F32") if is_nv else None
    *lead, half = packed.shape or (0,)
    size = 16 if is_nv else 32
    k = 2 * half
    check(
        packed.ndim >= 2
        and scale.kind not in floats
        and scale.shape == (*lead, -(-k // size))
        and (whole is None or whole.shape in ((), (1,))),
        f"{name!r} should have a scale for each {size} numbers, of 8 bits",
        *(packed, scale, whole),
    )
    format = NVFP4(inverse=True) if is_nv else MXFP4()
    dtype = source.dtype_or(ml_dtypes.bfloat16)

    def to_array():
        stored = {"codes": packed.read(), "scale": scale.read().view(np.uint8)}
        if whole is not None:
            number = whole.read().reshape(())
            number = np.broadcast_to(number, (*lead[:-1], 1, 1))
            stored["global_scale"] = bits_of(number.copy())
        return to_quantized(stored, format, (*lead, k), dtype)

    sources = tuple(t for t in (packed, scale, whole) if t is not None)
    return Entry(name, (*lead, k), dtype, format, _layout, sources, to_array)


def _bits(source, name, words, k):
    # Version 0.15 did not yet split codes over words, so that shapes alone mislead:
    # four codes of 7 bits took a word.
    numbers = configured(source, "num_bits")
    fitting = [bits for bits in range(2, 9) if _words(k, bits) == words]
    known = [bits for bits in fitting if bits in numbers or not numbers]
    if len(known) != 1:
        said = f", and the configuration has {numbers}" if numbers else ""
        raise ValueError(
            f"{name!r} should have rows of {k} codes of 2 to 8 bits, without gaps. Got "
            f"{words} words of 32 bits, which fit codes of "
            f"{fitting or 'no number of'} bits{said}."
        )
    return known[0]


def _words(count, bits):
    return -(-count * bits // 32)


def _number_of_groups(name: str, scale: RawTensor, rows: tuple[int, ...]) -> int:
    if scale.shape in ((), (1,), (1, 1), rows):
        return 1
    check(
        scale.shape[:-1] == rows,
        f"{name!r} should have scales for rows {rows}, or one scale",
        scale,
    )
    return scale.shape[-1]


def _spread(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    # Broadcasts one number for each row and group, or one for all.
    return np.broadcast_to(x.reshape(shape if x.size > 1 else (1,) * len(shape)), shape)


def compressed_parts(name: str, x: Any) -> dict[str, Part]:
    """Returns the tensors of an array in compressed-tensors. Raises a `ValueError` if
    compressed-tensors has no such format."""
    rows = Rows(name, x, "compressed-tensors")
    if compressed_scheme(rows.format) is None:
        raise rows.refused(
            "it has `Int`, without minima, `Int4`, `Int8`, `FP8`, `MXFP4` and "
            "`NVFP4(inverse=True)`"
        )
    if len(rows.shape) != 2:
        raise rows.refused(f"it should be a matrix; the shape is {rows.shape}")
    assert rows.name == f"{rows.prefix}weight"
    if isinstance(rows.format, Int | Int4):
        return _integer_parts(rows)
    if isinstance(rows.format, Int8 | FP8):
        return _eight_bit_parts(rows)
    return _e2m1_parts(rows)


def _integer_parts(rows):
    n, k = rows.shape
    name, format, groups = rows.name, rows.format, rows.groups
    bits = int(format.bits)
    words = -(-k * bits // 32)

    def packed():
        return as_words(resized(rows.stored("codes"), 4 * words))

    def zeros():
        found = rows.stored("zero_point")
        if found.max(initial=0) >= 2**bits:
            raise rows.refused(f"it has zero-points of more than {bits} bits")
        # Packed along columns.
        found = np.ascontiguousarray(found.swapaxes(0, 1), np.uint8)
        return repacked(found, bits).swapaxes(0, 1)

    parts = {
        f"{name}_packed": Part("I32", (n, words), packed),
        f"{name}_scale": _scale(rows),
        f"{name}_shape": Part("I64", (2,), lambda: np.array((n, k), np.int64)),
    }
    if has_zeros(format):
        shape = (-(-n * bits // 32), groups)
        parts[f"{name}_zero_point"] = Part("I32", shape, zeros)
    if format.ordered:
        index = lambda: rows.stored("block")[0]
        parts[f"{name}_g_idx"] = Part("I32", (k,), index)
    return parts


def _eight_bit_parts(rows):
    kind = "I8"
    if isinstance(rows.format, FP8):
        kind = kind_of(rows.name, rows.format.dtype)
    codes = ft.partial(rows.stored, "codes")
    return {
        rows.name: Part(kind, rows.shape, codes),
        f"{rows.name}_scale": _scale(rows),
    }


def _e2m1_parts(rows):
    n, k = rows.shape
    if k % rows.format.block_size != 0:
        raise rows.refused(
            f"rows should have a multiple of {rows.format.block_size} numbers"
        )
    name = rows.name
    kind = "U8" if isinstance(rows.format, MXFP4) else "F8_E4M3"
    parts = {
        f"{name}_packed": Part("U8", (n, k // 2), ft.partial(rows.stored, "codes")),
        f"{name}_scale": Part(
            kind, (n, k // rows.format.block_size), ft.partial(rows.stored, "scale")
        ),
    }
    if kind == "F8_E4M3":
        whole = ft.partial(rows.stored, "global_scale")
        parts[f"{name}_global_scale"] = Part("F32", (1,), whole)
    return parts


def _scale(rows):
    shape = (rows.shape[0], rows.groups)
    if isinstance(rows.format, FP8) and rows.format.scale == "tensor":
        shape = (1,)
    kind = kind_of(rows.name, rows.format.scale_dtype)
    return Part(kind, shape, ft.partial(rows.stored, "scale"))


def compressed_scheme(format: AbstractFormat) -> dict[str, Any] | None:
    """Returns the entries for a format in a configuration, its name and its options, or
    `None` if compressed-tensors has no such format."""
    strategy = "channel" if format.block_size is None else "group"
    options = {
        "group_size": format.block_size,
        "strategy": strategy,
        "symmetric": True,
        "dynamic": False,
    }
    if isinstance(format, Int | Int4) and format.offset != "minimum":
        options |= {"num_bits": int(format.bits), "type": "int"}
        options |= {"symmetric": not has_zeros(format)}
        options |= {"actorder": "group"} if format.ordered else {}
        return {"format": "pack-quantized", "weights": options}
    if isinstance(format, Int8):
        options |= {"num_bits": 8, "type": "int"}
        return {"format": "int-quantized", "weights": options}
    if isinstance(format, FP8) and format.dtype == jnp.float8_e4m3fn:
        options |= {"num_bits": 8, "type": "float"}
        options |= {"strategy": "tensor"} if format.scale == "tensor" else {}
        return {"format": "float-quantized", "weights": options}
    if format == NVFP4(inverse=True):
        options |= {"num_bits": 4, "type": "float", "strategy": "tensor_group"}
        return {"format": "nvfp4-pack-quantized", "weights": options}
    if isinstance(format, MXFP4):
        options |= {"num_bits": 4, "type": "float", "scale_dtype": "torch.uint8"}
        return {"format": "mxfp4-pack-quantized", "weights": options}
    return None


def compressed_config(formats: dict[str, AbstractFormat]) -> dict[str, Any]:
    """Returns the configuration of a model, given the formats of its arrays by their
    names."""
    groups: dict[AbstractFormat, list[str]] = {}
    for name, format in formats.items():
        groups.setdefault(format, []).append(name.removesuffix(".weight"))
    if not groups:
        return {}
    schemes = [(compressed_scheme(f) or {}, names) for f, names in groups.items()]
    layouts = {scheme["format"] for scheme, _ in schemes}
    return {
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "format": layouts.pop() if len(layouts) == 1 else "mixed-precision",
            "quantization_status": "compressed",
            "config_groups": {
                f"group_{i}": {"targets": names, **scheme}
                for i, (scheme, names) in enumerate(schemes)
            },
        }
    }


register_layout(
    "compressed-tensors",
    find_compressed,
    parts=compressed_parts,
    config=compressed_config,
    hints={"group_size": int},
)
