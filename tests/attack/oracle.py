import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np


_tiny = float(np.finfo(np.float32).tiny)
_largest = float(np.finfo(np.float32).max)
# What is wrong where numbers that are not finite are, but others.
unlike = "NaN where infinite, or the other way round"


@dataclasses.dataclass
class Expected:
    """What `x @ w` is, in float64.

    - `value`: the sum of the terms that are finite.
    - `size`: that of their absolute values.
    - `slack`: what is lost if all that is subnormal is taken as zero.
    - `wild`: of the terms that are not: NaN, an infinity, or zero if there are none.
    - `unsure`: where those depend on whether a subnormal number is zero.
    """

    value: np.ndarray
    size: np.ndarray
    slack: np.ndarray
    wild: np.ndarray
    unsure: np.ndarray

    def map(self, fn: Any) -> "Expected":
        """`fn` of each array, as for an axis that moves."""
        fields = dataclasses.fields(self)
        return Expected(*[fn(getattr(self, field.name)) for field in fields])


def product(x: Any, w: Any) -> Expected:
    """`x @ w`, of matrices and stacks of them."""
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    ok_x, ok_w = np.isfinite(x), np.isfinite(w)
    fx, fw = np.where(ok_x, x, 0), np.where(ok_w, w, 0)
    ax, aw = np.abs(fx), np.abs(fw)
    value, size = fx @ fw, ax @ aw
    # (Scales are multiplied by codes before or after the inputs are.)
    k = x.shape[-1]
    slack = 256 * _tiny * (_sum(ax, -1) + _sum(aw, -2) + k) + np.zeros_like(size)
    wild, unsure = np.zeros_like(size), np.zeros(size.shape, bool)
    if not (ok_x.all() and ok_w.all()):
        wild, unsure = _wild(x, w)
    return Expected(value, size, slack, wild, unsure)


def _sum(a, axis):
    return np.sum(a, axis=axis, keepdims=True)


def _wild(x, w):
    def meet(a, b):
        return a.astype(float) @ b.astype(float)

    up = meet(x == np.inf, w > 0) + meet(x == -np.inf, w < 0)
    up += meet(x > 0, w == np.inf) + meet(x < 0, w == -np.inf)
    down = meet(x == np.inf, w < 0) + meet(x == -np.inf, w > 0)
    down += meet(x < 0, w == np.inf) + meet(x > 0, w == -np.inf)
    every_x, every_w = np.ones_like(x), np.ones_like(w)
    nan = meet(np.isnan(x), every_w) + meet(every_x, np.isnan(w))
    nan += meet(np.isinf(x), w == 0) + meet(x == 0, np.isinf(w))
    small_x = (x != 0) & (np.abs(x) < _tiny)
    small_w = (w != 0) & (np.abs(w) < _tiny)
    unsure = meet(np.isinf(x), small_w) + meet(small_x, np.isinf(w)) > 0
    wild = np.where(up > 0, np.inf, np.where(down > 0, -np.inf, 0))
    return np.where((nan > 0) | (up > 0) & (down > 0), np.nan, wild), unsure


def allowed(expected: Expected, error: float, dtype: Any) -> np.ndarray:
    """How far off a result may be: by the declared bound, and by one rounding."""
    info = jnp.finfo(dtype)
    off = error * expected.size + expected.slack
    rounding = 0.51 * float(info.eps) * (np.abs(expected.value) + off)
    return (
        off + rounding + float(info.tiny) * (1 if info.bits == 32 else float(info.eps))
    )


def wrong(
    y: Any, expected: Expected, error: float, extra: np.ndarray | float = 0.0
) -> str | None:
    """What is wrong with a result. `None` if it is right."""
    if y.shape != expected.value.shape:
        return f"has shape {y.shape}, expected {expected.value.shape}"
    dtype, y = y.dtype, np.asarray(y, np.float64)
    largest = min(_largest, float(jnp.finfo(dtype).max))
    off = allowed(expected, error, dtype) + extra
    value, wild = expected.value, expected.wild
    # Sums may overflow on the way.
    safe = (expected.size * 2 + extra < _largest) & (np.abs(value) + off < largest)
    beyond = np.abs(value) - off > largest * (1 + float(jnp.finfo(dtype).eps))
    must_be_finite = (wild == 0) & safe & ~expected.unsure
    must_not = (wild != 0) | beyond
    finite = np.isfinite(y)
    if np.any(lost := must_not & finite & ~expected.unsure):
        return f"{lost.sum()} of {y.size} finite, should be NaN or infinite"
    if np.any(spoiled := must_be_finite & ~finite):
        return f"{spoiled.sum()} of {y.size} NaN or infinite, should be finite"
    if np.any(other := _differs(y, wild) & safe & ~expected.unsure):
        return f"{other.sum()} of {y.size} {unlike}"
    compared = (wild == 0) & finite & ~expected.unsure
    far = compared & (np.abs(y - value) > off)
    if np.any(far):
        size = np.where(expected.size == 0, 1, expected.size)
        ratio = np.max(np.abs(y - value) / size, where=far, initial=0)
        return (
            f"off by {ratio:.2g} of |x||W|, declared {error:.0e}, {far.sum()} of "
            f"{y.size}"
        )
    return None


def _differs(y, wild):
    nan = np.isnan(wild)
    return (wild != 0) & (np.isnan(y) != nan) | np.isinf(wild) & (
        y != wild
    ) & ~np.isnan(y)


def loosened(x: Any, w: Any, expected: Expected) -> Expected:
    """For a bound that holds only of weights unrelated to the inputs, where they are
    not: relative to the largest input of a row, and all weights of a column."""
    x, w = (np.abs(np.where(np.isfinite(a), a, 0)) for a in (x, w))
    largest = np.max(x, axis=-1, keepdims=True, initial=0)
    size = largest * (np.sum(w, axis=-2, keepdims=True) + w.max(initial=0))
    return dataclasses.replace(expected, size=size + np.zeros_like(expected.size))
