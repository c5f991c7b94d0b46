"""What the estimators are defined to be, in float64 and NumPy, of matrices `n k` with
the contracted axis last."""

import numpy as np

import eqquant as eqq

from ..formats.reference import _cast, _points, _scale, round_trip


def each_block(format, *arrays):
    """The parts of some matrices that share a scale."""
    if isinstance(format, eqq.Ternary) and format.scale == "tensor":
        return [arrays]
    n, k = arrays[0].shape
    size = k if format.block_size is None else format.block_size
    return [
        tuple(a[i : i + 1, j : j + size] for a in arrays)
        for i in range(n)
        for j in range(0, k, size)
    ]


def scales(w, format):
    """Of each block, in order, as they are stored."""
    base = format.base if isinstance(format, eqq.Nested) else format
    found = [_scale(block.reshape(-1), base) for (block,) in each_block(format, w)]
    found = np.concatenate(found)
    if isinstance(format, eqq.Nested):
        found = round_trip(found.reshape(w.shape[0], -1), format.scale).reshape(-1)
    return _cast(found, base.scale_dtype)


def ends(block, scale, format):
    """The first and the last number that a block can represent."""
    match format:
        case eqq.Nested():
            return ends(block, scale, format.base)
        case eqq.Int8():
            return -127 * scale, 127 * scale
        case eqq.Int4(symmetric=True):
            return -7 * scale, 7 * scale
        case eqq.Int4(symmetric=False):
            zero = np.clip(np.round(-min(0, block.min()) / scale), 0, 15)
            return -zero * scale, (15 - zero) * scale
        case eqq.Dynamic8():
            return -0.99296875 * scale, scale
        case _:
            return -scale, scale


def is_inside(w, scales, format):
    """Which numbers lie between the first and the last that their block can represent,
    and by how much, relative to the scale, they do."""
    inside, margin = np.zeros(w.shape, bool), np.zeros(w.shape)
    for (block, i, m), scale in zip(
        each_block(format, w, inside, margin), scales, strict=True
    ):
        low, high = ends(block, scale, format)
        i[...] = (low <= block) & (block <= high)
        m[...] = np.minimum(np.abs(block - low), np.abs(high - block)) / scale
    return inside, margin


def learned(w, scales, format, last):
    """`w` with given scales after rounding; the derivative of each number of that by
    the scale; and which numbers have a derivative of their own."""
    inside, _ = is_inside(w, scales, format)
    base = format.base if isinstance(format, eqq.Nested) else format
    value, slope = np.zeros(w.shape), np.zeros(w.shape)
    parts = each_block(format, w, value, slope, inside)
    for (block, v, d, i), scale in zip(parts, scales, strict=True):
        p = _points(block, scale, base)
        v[...] = p * scale
        number = w.size / len(scales)
        d[...] = np.where(i, p - block / scale, p) / np.sqrt(number * last)
    return value, slope, inside
