"""Each format again, in float64 and NumPy: written from what the formats are defined to
be, and not from how the library computes them."""

import hashlib
import math

import ml_dtypes
import numpy as np

import eqquant as eqq


normal_float = np.array(
    # fmt: off
    [
        -1,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1,
    ]
    # fmt: on
)


def dynamic():
    # The middles of equal parts of each decade, their negatives, zero and one.
    parts = [(np.arange(2**i) + 0.5) / 2**i for i in range(7)]
    points = [10.0 ** (i - 6) * (0.1 + 0.9 * part) for i, part in enumerate(parts)]
    return np.sort(np.concatenate([*points, *(-p for p in points), [0, 1]]))


def round_trip(w, format):
    """What `w` of shape `*b n k` becomes, blocks along its last axis."""
    w = np.asarray(w, np.float64)
    if isinstance(format, eqq.Rotated):
        r = rotation(w.shape[-1], format)
        return round_trip(w @ r, format.format) @ r.T
    if isinstance(format, eqq.Ternary) and format.scale == "tensor" and w.ndim > 1:
        # All of a matrix is one block.
        flat = w.reshape(*w.shape[:-2], math.prod(w.shape[-2:]))
        return _round_trip(flat, format).reshape(w.shape)
    return _round_trip(w, format)


def rotation(k, format):
    """The matrix `R` that inputs of size `k` are multiplied with."""
    size = max(2**i for i in range(12) if k % 2**i == 0 and 2**i <= format.block)
    bits = hashlib.shake_256(format.seed.to_bytes(8, "little")).digest(size // 8 + 1)
    negative = [bits[i // 8] >> i % 8 & 1 for i in range(size)]
    block = [
        [(-1) ** (negative[i] + (i & j).bit_count()) for j in range(size)]
        for i in range(size)
    ]
    return np.kron(np.eye(k // size), np.array(block)) / math.sqrt(size)


def _round_trip(w, format):
    base = format.base if isinstance(format, eqq.Nested) else format
    k = w.shape[-1]
    starts = range(0, k, k if format.block_size is None else format.block_size)
    blocks = np.split(w, starts[1:], axis=-1)
    scales = [_scale(block, base) for block in blocks]
    if isinstance(format, eqq.Nested):
        scales = round_trip(np.concatenate(scales, -1), format.scale)
        scales = np.split(scales, len(blocks), axis=-1)
    scales = [_cast(scale, base.scale_dtype, _is_mean(base)) for scale in scales]
    return np.concatenate(
        [_points(b, s, base) * s for b, s in zip(blocks, scales)], axis=-1
    )


def _cast(scale, dtype, mean=False):
    dtypes = {
        "float32": np.float32,
        "float16": np.float16,
        "bfloat16": ml_dtypes.bfloat16,
    }
    narrow = scale.astype(dtypes[dtype.name])
    if narrow.dtype == np.float16 and not mean:
        # No number is beyond the last code by more than a thousandth.
        less = narrow < 0.999 * scale
        narrow = np.where(less, np.nextafter(narrow, np.float16(np.inf)), narrow)
    return narrow.astype(np.float64)


def _is_mean(format):
    return isinstance(format, eqq.Binary | eqq.Ternary)


def _scale(block, format):
    magnitude = np.abs(block)
    largest = np.max(magnitude, axis=-1, keepdims=True)
    mean = np.mean(magnitude, axis=-1, keepdims=True)
    match format:
        case eqq.NF4() | eqq.Dynamic8():
            return largest
        case eqq.Int8():
            return largest / 127
        case eqq.Int4(symmetric=True):
            return largest / 7
        case eqq.Square4(signed=True):
            return largest / 49
        case eqq.Int4(symmetric=False):
            low, high = _range(block)
            return (high - low) / 15
        case eqq.Binary() | eqq.Ternary(rule="absmean"):
            return mean
        case eqq.Ternary(rule="threshold"):
            beyond = magnitude > 0.7 * mean
            number = np.sum(beyond, axis=-1, keepdims=True)
            total = np.sum(magnitude, axis=-1, keepdims=True, where=beyond)
            return total / np.maximum(number, 1)
        case _:
            raise NotImplementedError(format)


def _points(block, scale, format):
    unit = block / np.where(scale == 0, 1, scale)
    match format:
        case eqq.NF4():
            # Of two equally near points, the lower.
            edges = (normal_float[1:] + normal_float[:-1]) / 2
            return normal_float[np.searchsorted(edges, unit, side="left")]
        case eqq.Dynamic8():
            points = dynamic()
            edges = (points[1:] + points[:-1]) / 2
            return points[np.searchsorted(edges, unit, side="left")]
        case eqq.Int8():
            return np.clip(np.round(unit), -127, 127)
        case eqq.Int4(symmetric=True):
            return np.clip(np.round(unit), -7, 7)
        case eqq.Square4(signed=True):
            # Of two equally near points, the one that is nearer to zero.
            squares = np.arange(8) ** 2
            edges = (squares[1:] + squares[:-1]) / 2
            nearest = squares[np.searchsorted(edges, np.abs(unit), side="left")]
            return np.sign(unit) * nearest
        case eqq.Int4(symmetric=False):
            low, _ = _range(block)
            zero = np.clip(np.round(-low / np.where(scale == 0, 1, scale)), 0, 15)
            return np.clip(np.round(unit) + zero, 0, 15) - zero
        case eqq.Ternary(rule="absmean"):
            return np.clip(np.round(unit), -1, 1)
        case eqq.Ternary(rule="threshold"):
            magnitude = np.abs(block)
            mean = np.mean(magnitude, axis=-1, keepdims=True)
            return np.sign(block) * (magnitude > 0.7 * mean)
        case eqq.Binary():
            return np.where(block >= 0, 1.0, -1.0)
        case _:
            raise NotImplementedError(format)


def _range(block):
    low = np.min(block, axis=-1, keepdims=True)
    high = np.max(block, axis=-1, keepdims=True)
    return np.minimum(low, 0), np.maximum(high, 0)


def rows(w, axis):
    """The array `*b k` that a format sees: contracted axes last, several as one."""
    axes = axis if isinstance(axis, tuple) else (axis,)
    w = np.moveaxis(np.asarray(w, np.float64), axes, range(-len(axes), 0))
    return w.reshape(*w.shape[: w.ndim - len(axes)], -1)
