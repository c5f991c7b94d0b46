import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

import eqquant as eqq

from .case import Case


kinds = ("normal", "normal", "normal", "tiny", "huge", "zeros", "constant", "sparse")
kinds += ("outliers", "not finite", "not finite")
# Those in which an output may miss the largest inputs of its row.
sparse = ("zeros", "sparse", "outliers")


def draw_weight(
    case: Case,
    shape: tuple[int, ...],
    kind: str,
    format: eqq.AbstractFormat,
    dtype: Any,
) -> Any:
    """Numbers that the format is made to take."""
    rng = case.rng
    if isinstance(format, eqq.formats.AbstractExact):
        w = rng.choice(format.domain, shape)
        keep = 0.05 if kind == "sparse" else 0.0 if kind == "zeros" else 1.0
        return jnp.asarray(np.where(rng.random(shape) < keep, w, 0), dtype)
    w = rng.standard_normal(shape)
    if kind == "tiny":
        w *= 1e-6
    elif kind == "huge":
        w *= _huge(format, dtype)
    elif kind == "zeros":
        w *= 0
    elif kind == "constant":
        w = np.full(shape, rng.standard_normal())
    elif kind == "sparse":
        w *= rng.random(shape) < 0.05
    elif kind == "outliers":
        w *= np.where(rng.random(shape) < 0.01, 100.0, 1.0)
    return jnp.asarray(w.astype(np.float32)).astype(dtype)


def _huge(format, dtype):
    # What the scales can hold.
    format = format.format if isinstance(format, eqq.Rotated) else format
    halves = isinstance(format, eqq.formats.AbstractGGUF) and not isinstance(
        format, eqq.MXFP4
    )
    base = getattr(format, "base", format)
    if halves or jnp.float16 in (getattr(base, "scale_dtype", None), dtype):
        return 1e3
    return 1e30


# Bits of floats that are not finite: NaNs of all ones (which overflow where bits are
# added to round), quiet and signalling, and infinities. And those of bytes: all ones.
_bits = {
    np.dtype(np.uint32): (
        2**32 - 1,
        2**31 - 1,
        0x7FC00000,
        0x7F800001,
        0x7F800000,
        0xFF800000,
    ),
    "float16": (0xFFFF, 0x7FFF, 0x7E00, 0x7C01, 0x7C00, 0xFC00),
    "bfloat16": (0xFFFF, 0x7FFF, 0x7FC0, 0x7F81, 0x7F80, 0xFF80),
    np.dtype(np.uint8): (255,),
}


def patched(case: Case, q: eqq.QuantizedArray) -> eqq.QuantizedArray:
    """With some scales that are not finite, as in a file that is damaged."""
    format = q.format.format if isinstance(q.format, eqq.Rotated) else q.format

    def patch(path, a):
        key = path[-1].key
        if key == "blocks":
            return _patched_blocks(case, a, format, q.layout.row_axis)
        scaled = key in ("scale", "global_scale")
        if not scaled or a.size == 0 or a.dtype in (np.int8, np.int32):
            return a
        dtype = getattr(format, "scale_dtype", np.dtype(np.float32))
        bits = _bits[dtype.name if a.dtype == np.uint16 else a.dtype]
        new = np.array(a)
        places = case.rng.integers(new.size, size=case.integer(1, 3))
        new.reshape(-1)[places] = case.pick(bits)
        return jnp.asarray(new)

    stored = jtu.tree_map_with_path(patch, q.stored)
    return dataclasses.replace(q, stored=stored)


def _patched_blocks(case, a, format, row_axis):
    if a.size == 0:
        return a
    new = np.array(a)
    rows = new if row_axis == -2 or new.ndim < 2 else new.swapaxes(-1, -2)
    block = case.integer(0, rows.shape[-1] // format.type_size - 1)
    start = block * format.type_size + format.scale_at
    pair = np.array([case.pick(_bits["float16"])], np.uint16).view(np.uint8)
    index = tuple(case.integer(0, size - 1) for size in rows.shape[:-1])
    rows[(*index, slice(start, start + 2))] = pair
    return jnp.asarray(new)


def draw_quantized(
    case: Case,
    format: eqq.AbstractFormat,
    shape: tuple[int, ...],
    kind: str,
    dtype: Any,
    **kwargs: Any,
) -> eqq.QuantizedArray:
    w = draw_weight(case, shape, kind, format, dtype)
    q = eqq.quantize(w, format, **kwargs)
    return patched(case, q) if kind == "not finite" else q


@jax.jit
def _decoded(q):
    return q.astype(jnp.float32).dequantize()


def dense(q: eqq.QuantizedArray) -> np.ndarray:
    """What the codes stand for, before it is rounded to the dtype, in float64."""
    return np.asarray(_decoded(q), np.float64)
