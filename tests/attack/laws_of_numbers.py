"""What becomes of numbers of any size."""

import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from .formats import name_of
from .same import refuses


def again(case, q, d, w):
    absmax = (eqq.NF4, eqq.Int8, eqq.Int4)
    symmetric = getattr(q.format, "symmetric", True)
    narrow = q.dtype != jnp.float32 or q.format.__class__ not in absmax
    if narrow or not symmetric or q.format.scale_dtype != np.float32:
        return
    codes = eqq.quantize(d, q.format, axis=q.axis).stored["codes"]
    yield "codes", np.array_equal(codes, q.stored["codes"])


def quantized_inside(case, q, d, w):
    # In a program, and mapped.
    inside = jax.jit(lambda w: eqq.quantize(w, q.format, axis=q.axis).dequantize())
    yield "jit", _close(inside(w), d)
    if w.ndim > 1 and isinstance(q.axis, int) and q.axis > -w.ndim and 0 not in w.shape:
        if name_of(q.format) in ("NVFP4", "BnbScale", "Nested") or w.ndim == 2:
            return  # what the rows of a matrix share is of one row, then
        mapped = jax.vmap(lambda w: eqq.quantize(w, q.format, axis=q.axis))(w)
        yield "vmap", _close(mapped.dequantize(), d)


def _close(a, b):
    # (Programs may divide otherwise, and round a number near a half the other way.)
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    largest = np.max(np.abs(b), initial=0)
    return np.mean(np.abs(a - b) > 1e-5 * largest) < 0.01 if a.size else True


def not_finite(case, q, d, w):
    # What is traced gives NaN over its block at least; what is not is an error.
    if q.size == 0 or isinstance(q.format, eqq.formats.AbstractExact):
        return
    place = tuple(case.integer(0, size - 1) for size in q.shape)
    bad = w.at[place].set(case.pick((np.nan, np.inf, -np.inf)))
    inside = jax.jit(lambda w: eqq.quantize(w, q.format, axis=q.axis).dequantize())
    found = np.asarray(inside(bad), float)
    yield f"{place}", np.isnan(found[place])
    known = np.isfinite(found)
    yield "others", _close(found[known], np.asarray(d, float)[known])
    yield "error", refuses(lambda: eqq.quantize(bad, q.format, axis=q.axis))


def finite_or_refused(case, q, d, w):
    # Whatever the size of finite numbers: they come back finite, or there is an error.
    if isinstance(q.format, eqq.formats.AbstractExact) or q.size == 0:
        return
    size = 10.0 ** case.integer(2, 38)
    large = np.clip(np.asarray(w, np.float64) * size, -3.3e38, 3.3e38)
    large = jnp.asarray(large.astype(np.float32))

    def quantized():
        return eqq.quantize(large, q.format, axis=q.axis)

    if not refuses(quantized):
        found = np.asarray(quantized().dequantize())
        yield f"times {size:.0e}", np.isfinite(found).all()


def of_any_size(case, q, d, w):
    # Numbers of another size lose as much, while the scales can hold them.
    scaled = isinstance(q.format, eqq.formats.AbstractScaled) and q.dtype == jnp.float32
    if not scaled or q.size < 64 or not np.any(w) or isinstance(q.format, eqq.Nested):
        return
    scale = np.abs(np.asarray(q.scale, np.float64))
    if not np.all(scale > 1e-30) or not np.all(scale < 1e4):
        return
    # The least scale becomes 64 times the least number there is of its dtype, or more.
    of_gguf = isinstance(q.format, eqq.formats.AbstractGGUFBlocks)
    narrow = of_gguf or q.format.scale_dtype == np.float16
    least = 64 * 2.0**-24 if narrow else 1e-35
    power = 2.0 ** np.ceil(np.log2(least / scale.min()) + case.integer(0, 6))
    small = eqq.quantize(w * np.float32(power), q.format, axis=q.axis).dequantize()
    before = _sqnr(d, w)
    after = _sqnr(np.asarray(small, np.float64) / power, w)
    yield f"times {power:.2g}: {after:.1f} dB, not {before:.1f}", after > before - 2


def _sqnr(a, b):
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return 10 * np.log10(np.sum(b**2) / max(np.sum((a - b) ** 2), 1e-300))


laws = (again, quantized_inside, not_finite, finite_or_refused, of_any_size)
