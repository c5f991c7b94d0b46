import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant import report
from eqquant._array import squares_of_rows, unit_of

from ..helpers import native_formats, normal


def _expected(w, approximation):
    w, approximation = (np.asarray(a, np.float64) for a in (w, approximation))
    return 10 * np.log10(np.sum(w**2) / np.sum((w - approximation) ** 2))


def _sqnr(model, dense):
    (row,) = report(model, dense).rows
    assert row.sqnr is not None
    return row.sqnr


@pytest.mark.examples(2)
@native_formats
def test_formats(format):
    w = normal(48, 160)
    q = eqq.quantize(w, format)
    assert _sqnr(q, w) == pytest.approx(_expected(w, q.dequantize()), abs=1e-3)


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "dtype, scale",
    [("float32", 1e-36), ("float32", 7e37), ("float16", 1e-3), ("bfloat16", 1e-25)],
)
def test_magnitudes(dtype, scale):
    w = (normal(48, 160) * scale).astype(dtype)
    q = eqq.quantize(w, "int8")
    assert _sqnr(q, w) == pytest.approx(_expected(w, q.dequantize()), abs=1e-3)


def test_is_summed_well():
    # Too many numbers for one sum in float32: it would stop growing.
    w = np.ones((2**13, 2**12), np.float32)
    assert _sqnr(w * np.float32(1 + 2**-10), w) == pytest.approx(
        20 * math.log10(2**10), abs=1e-3
    )


def test_ends():
    w = normal(32, 32)
    zeros = jnp.zeros_like(w)
    assert _sqnr(w, w) == math.inf
    assert _sqnr(zeros, zeros) == math.inf
    assert _sqnr(w, zeros) == -math.inf
    assert _sqnr(zeros, w) == pytest.approx(0, abs=1e-3)
    assert math.isnan(_sqnr(w.at[0, 0].set(math.nan), w))
    assert _sqnr(jnp.ones(()), jnp.ones(())) == math.inf
    assert _sqnr(jnp.zeros((0, 3)), jnp.zeros((0, 3))) == math.inf


@pytest.mark.optimized
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_memory(dtype):
    w = jax.ShapeDtypeStruct((1024, 1024), dtype)
    unit = jax.ShapeDtypeStruct((), "float32")
    for fn, args in ((unit_of, (w,)), (squares_of_rows, (w, w, unit))):
        memory = jax.jit(fn).lower(*args).compile().memory_analysis()
        assert memory is not None
        assert memory.temp_size_in_bytes < w.size * w.dtype.itemsize / 100
