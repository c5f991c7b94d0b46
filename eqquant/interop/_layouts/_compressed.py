from collections.abc import Iterator

import ml_dtypes
import numpy as np

from ...formats import Int, Int4, Int8, MXFP4, NVFP4
from .._checkpoint import Entry
from .._containers import check_shape, RawTensor
from ._base import (
    as_bytes,
    bits_of,
    check,
    floats,
    packed_size,
    resized,
    Source,
    to_quantized,
    unpack,
)
from ._groups import group_size, is_ordered
from ._scheme import said, scale_blocks


_layout = "compressed-tensors"


def find_compressed(source: Source) -> Iterator[Entry]:
    """Arrays of integers, and of 4-bit floating-point numbers, as compressed-tensors
    writes them: `weight_packed` or `weight`, `weight_scale`, `weight_zero_point`.

    Integers have half of their range added, and are one stream of bits for each row.
    """
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


def _packed(source, name, packed, scale):
    lengths = source.need(f"{name}_shape", name, "I64", "I32")
    zeros = source.get(f"{name}_zero_point", "I32", "I8")
    g_idx = source.get(f"{name}_g_idx", "I32", "I64")
    check(
        packed.ndim >= 2 and lengths.shape == (packed.ndim,),
        f"{name!r} should have rows that are packed, and as many sizes as axes",
        *(packed, lengths),
    )
    shape = tuple(map(int, lengths.read()))
    *lead, n, k = shape
    check_shape(name, shape)
    bits = _bits(source, name, packed.shape[-1], k)
    groups = _number_of_groups(name, scale, (*lead, n))
    packed_zeros = zeros is not None and zeros.kind == "I32"
    per_group = _words(n, bits) if packed_zeros else n
    check(
        packed.shape[:-1] == (*lead, n)
        and (g_idx is None or g_idx.shape == (k,))
        and (
            zeros is None
            or zeros.shape == (*lead, per_group, groups)
            # One of all, which is not packed.
            or zeros.shape == scale.shape == (1,)
            and not packed_zeros
        ),
        f"{name!r} should have shape {shape}, in codes of {bits} bits",
        *(packed, scale, zeros, g_idx),
    )
    size = group_size(name, said(source, "group_size"), k, groups)
    ordered = is_ordered(g_idx, groups, size)
    if ordered or bits != 4:
        offset = None if zeros is None else "zero_point"
        format = Int(bits, size, offset, ordered, scale.dtype)
    else:
        format = Int4(size, symmetric=zeros is None, scale_dtype=scale.dtype)

    def to_array():
        # Rows end with whole words there.
        codes = resized(as_bytes(packed.read()), packed_size(k, bits))
        stored = {
            "codes": codes,
            "scale": _spread(bits_of(scale.read()), (*lead, n, groups)),
        }
        if zeros is not None and packed_zeros:
            # Down the rows.
            found = unpack(zeros.read().swapaxes(-1, -2), bits, n)
            stored["zero_point"] = found.swapaxes(-1, -2)
        elif zeros is not None:
            half = np.uint8(2 ** (bits - 1))
            found = zeros.read().view(np.uint8) + half
            stored["zero_point"] = _spread(found, (*lead, n, groups))
        if ordered and g_idx is not None:
            index = g_idx.read().astype(np.int32)
            stored["block"] = np.broadcast_to(index, (*lead, 1, k))
        return to_quantized(stored, format, shape, scale.dtype)

    sources = tuple(t for t in (packed, scale, lengths, zeros, g_idx) if t is not None)
    return Entry(name, shape, scale.dtype, format, _layout, sources, to_array)


def _plain(source, name, weight, scale):
    zeros = source.get(f"{name}_zero_point", "I8")
    check(weight.ndim >= 2, f"{name!r} should have two axes", weight)
    check(
        zeros is None or zeros.shape == scale.shape,
        f"{name!r} should have as many zero-points as scales",
        *(scale, zeros),
    )
    blocks = scale_blocks(source, name, weight, scale)
    if zeros is None:
        format = Int8(blocks.size, scale.dtype)
    else:
        format = Int(8, blocks.size, "zero_point", scale_dtype=scale.dtype)

    def to_array():
        found = blocks.by_row(bits_of(scale.read()), weight.shape)
        stored = {"codes": weight.read(), "scale": found}
        if zeros is not None:
            half = np.uint8(128)
            stored["codes"] = stored["codes"].view(np.uint8) + half
            zero = zeros.read().view(np.uint8) + half
            stored["zero_point"] = blocks.by_row(zero, weight.shape)
        return to_quantized(stored, format, weight.shape, scale.dtype)

    sources = tuple(t for t in (weight, scale, zeros) if t is not None)
    return Entry(name, weight.shape, scale.dtype, format, _layout, sources, to_array)


def _e2m1(source, name, packed, scale):
    whole = source.get(f"{name}_global_scale", "F32")
    is_nv = scale.kind == "F8_E4M3"
    *lead, half = packed.shape
    size = 16 if is_nv else 32
    k = 2 * half
    check(
        packed.ndim >= 2
        and scale.shape == (*lead, -(-k // size))
        and (whole is None or whole.shape in ((), (1,))),
        f"{name!r} should have a scale for each {size} numbers",
        *(packed, scale, whole),
    )
    format = NVFP4(inverse=True) if is_nv else MXFP4()
    dtype = source.dtype_or(ml_dtypes.bfloat16)

    def to_array():
        stored = {"codes": packed.read(), "scale": scale.read().view(np.uint8)}
        if is_nv:
            number = np.ones((), np.float32) if whole is None else whole.read()
            number = np.broadcast_to(number.reshape(()), (*lead[:-1], 1, 1))
            stored["global_scale"] = bits_of(number.copy())
        return to_quantized(stored, format, (*lead, k), dtype)

    sources = tuple(t for t in (packed, scale, whole) if t is not None)
    return Entry(name, (*lead, k), dtype, format, _layout, sources, to_array)


def _bits(source, name, words, k):
    fitting = [bits for bits in range(2, 9) if _words(k, bits) == words]
    if len(fitting) > 1:
        numbers = said(source, "num_bits")
        fitting = [bits for bits in fitting if bits in numbers] or fitting
    if len(fitting) != 1:
        raise ValueError(
            f"{name!r} should have rows of {k} codes of 2 to 8 bits. Got {words} words "
            f"of 32 bits, which is so for {fitting or 'none of them'}."
        )
    return fitting[0]


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
    # Of each row, or of all.
    return np.broadcast_to(x.reshape(shape if x.size > 1 else (1,) * len(shape)), shape)
