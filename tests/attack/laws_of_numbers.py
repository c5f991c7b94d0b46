"""What becomes of numbers of any size."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq
from eqquant.formats import AbstractDithered

from .formats import name_of
from .same import refuses


def ternary(case, q, d, w):
    # Numbers that are -s and s (and 0) in each block are what they are.
    if not isinstance(q.format, eqq.Ternary | eqq.Binary) or q.size == 0:
        return
    signs = case.rng.choice([-1.0, 1.0], w.shape)
    if isinstance(q.format, eqq.Ternary):
        signs *= case.rng.random(w.shape) < case.pick((0.1, 0.6, 1.0))
    # (A power of two, which scales of 16 bits hold, too.)
    exact = jnp.asarray(signs * 2.0 ** case.integer(-10, 10), w.dtype)
    found = eqq.quantize(exact, q.format, axis=q.axis)
    yield "exact", np.array_equal(found.dequantize(), exact)
    once = eqq.quantize(jnp.asarray(d), q.format, axis=q.axis).dequantize()
    yield "again", q.dtype != jnp.float32 or np.array_equal(once, d)


def again(case, q, d, w):
    absmax = (eqq.NF4, eqq.Int8, eqq.Int4)
    symmetric = getattr(q.format, "symmetric", True)
    narrow = q.dtype != jnp.float32 or q.format.__class__ not in absmax
    if narrow or not symmetric or q.format.scale_dtype != np.float32:
        return
    codes = eqq.quantize(d, q.format, axis=q.axis).stored["codes"]
    yield "codes", np.array_equal(codes, q.stored["codes"])


def dithered(case, q, d, w):
    # Numbers of all sizes are the means of what they become, step after step.
    if not isinstance(q.format, AbstractDithered):
        return
    like = dict(block_size=None, dithered=True, scale_dtype=jnp.dtype("float32"))
    format = dataclasses.replace(q.format, **like)
    size, number = np.float32(10 ** case.rng.uniform(-15, 15)), 1024
    points = np.asarray(format.to_points(jnp.arange(2 ** int(format.bits))))
    points = np.unique(points.astype(np.float64)) * size
    x = size * 10 ** case.rng.uniform(-8, 0, 127)
    if format.signed:
        x *= case.rng.choice([-1, 1], 127)
    else:
        # (What is positive stays so.)
        x = np.maximum(x, points[points > 0][0])
    x = np.append(np.clip(x, points[0], None), size).astype(np.float32)

    @jax.jit
    def draw(seed):
        return format.decode(format.encode_dithered(x[None], seed), 0)[0]

    first = case.integer(0, 10**6)
    draws = jax.vmap(draw)(first + jnp.arange(number, dtype=jnp.int32))
    mean, x = np.asarray(draws, np.float64).mean(0), x.astype(np.float64)
    above = np.clip(np.searchsorted(points, x), 1, len(points) - 1)
    low, high = points[above - 1], points[above]
    deviation = np.sqrt(np.maximum((high - x) * (x - low), 0) / number)
    # (A point that is rarer than one in `number` may not be drawn.)
    bound = 6 * deviation + 8 * (high - low) / number + 1e-6 * np.abs(x)
    yield f"{format}: mean", np.all(np.abs(mean - x) <= bound)


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


laws = (
    *(again, ternary, dithered, quantized_inside),
    *(not_finite, finite_or_refused, of_any_size),
)
