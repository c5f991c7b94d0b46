import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqquant as eqq

from ..helpers import native_formats, normal, trees_equal
from .reference import round_trip, rows


# Odd sizes, blocks that are whole and short, leading axes, several axes as one. (They
# are few, since each is a compilation.)
arrays = st.sampled_from(
    [
        ((7, 33), -1, jnp.bfloat16),
        ((130, 5), -2, jnp.float16),
        ((2, 129, 3), 1, jnp.float32),
    ]
)
seeds = st.integers(0, 99)
# 0.1 dB
decibel = 10**0.01 - 1


def weight(shape, dtype, seed, size=1.0, zeros=False):
    rng = np.random.default_rng(seed)
    w = size * rng.standard_t(5, shape)
    if zeros:
        w = np.where(rng.random(shape) < 0.3, 0, w)
    return jnp.asarray(w, dtype)


def scales(q):
    return np.asarray(q.scale)


def rounding(q):
    return max(1e-6, float(jnp.finfo(q.dtype).eps))


def assert_accurate(q, w):
    """The error of `q` is that of the reference, within 0.1 dB."""
    decoded, w = rows(q.dequantize(), q.axis), rows(w, q.axis)
    expected = jnp.asarray(round_trip(w, q.format), q.dtype)
    expected = np.asarray(expected, np.float64)
    ours, theirs = np.sum((decoded - w) ** 2), np.sum((expected - w) ** 2)
    assert abs(ours - theirs) <= decibel * theirs + np.sum((1e-6 * w) ** 2)


@pytest.mark.examples(1)
@native_formats
@settings(max_examples=6)
@given(
    array=arrays,
    size=st.sampled_from([1.0, 1e-5, 1e3]),
    zeros=st.booleans(),
    seed=seeds,
)
def test_round_trip(format, array, size, zeros, seed):
    shape, axis, dtype = array
    w = weight(shape, dtype, seed, size, zeros)
    q = eqq.quantize(w, format, axis=axis)
    decoded = q.dequantize()
    assert (q.shape, q.dtype) == (shape, dtype)
    assert (decoded.shape, decoded.dtype) == (shape, dtype)
    assert_accurate(q, w)
    if not isinstance(format, eqq.Binary):
        assert np.all(np.asarray(decoded)[np.asarray(w) == 0] == 0)


@pytest.mark.examples(3)
@pytest.mark.parametrize("format", [eqq.NF4(64), eqq.Int8(32), eqq.Ternary(48)])
@pytest.mark.parametrize("shape, axis", [((1,), -1), ((6, 3, 20), (0, 2))])
def test_round_trip_of_other_shapes(format, shape, axis):
    w = weight(shape, jnp.float32, seed=0)
    assert_accurate(eqq.quantize(w, format, axis=axis), w)


# Whatever is contracted. (`tests.laws` has that of all formats, abstractly.)
@pytest.mark.examples(3)
@pytest.mark.parametrize("format", [eqq.NF4(64), eqq.Int8(), eqq.Ternary()])
@pytest.mark.parametrize("shape", [(0,), (0, 2, 3)])
def test_empty(format, shape):
    for axis in range(-len(shape), 0):
        q = eqq.quantize(jnp.zeros(shape), format, axis=axis)
        assert q.shape == q.dequantize().shape == shape
        assert q.size == 0


@pytest.mark.examples(2)
@native_formats
def test_float64(format):
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal((130, 5)))
        q = eqq.quantize(w, format)
        decoded = q.dequantize()
        y = w.T @ q
        assert w.dtype == q.dtype == decoded.dtype == y.dtype == jnp.float64
        assert_accurate(q, w)
        # The scales and the grid are float32, and all else is float64. (What is
        # decoded is rotated back in float32, and products rotate in float64.)
        tolerance = 1e-5 if isinstance(format, eqq.Rotated) else 1e-12
        np.testing.assert_allclose(y, w.T @ decoded, rtol=tolerance, atol=tolerance)


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", [eqq.NF4(64), eqq.Int8(), eqq.Int4(64)])
@settings(max_examples=8)
@given(array=arrays, seed=seeds)
def test_ends_of_blocks(format, array, seed):
    shape, axis, dtype = array
    w = weight(shape, dtype, seed)
    q = eqq.quantize(w, format, axis=axis)
    w, decoded = rows(w, axis), rows(q.dequantize(), axis)
    k = w.shape[-1]
    starts = range(0, k, format.block_size or k)[1:]
    for old, new in zip(np.split(w, starts, -1), np.split(decoded, starts, -1)):
        end = np.abs(old) == np.max(np.abs(old), -1, keepdims=True)
        rtol = 0 if isinstance(format, eqq.NF4) else 2e-7
        np.testing.assert_allclose(new[end], old[end], rtol=rtol)


@pytest.mark.parametrize(
    "format, bound", [(eqq.NF4(64), 0.11), (eqq.Int8(), 0.01), (eqq.Int4(64), 0.13)]
)
def test_small_float16_weights(format, bound):
    w = np.asarray(1e-5 * normal(130, 5), np.float16)
    decoded = eqq.quantize(w, format).dequantize()
    w, decoded = np.asarray(w, np.float64), np.asarray(decoded, np.float64)
    assert np.linalg.norm(decoded - w) < bound * np.linalg.norm(w)


@pytest.mark.examples(2)
@native_formats
def test_tiny(format):
    # Subnormal numbers are flushed, those of scales included.
    w = np.random.default_rng(0).uniform(-1, 1, (130, 5)).astype(np.float32)
    decoded = eqq.quantize(w, format).dequantize()
    error = np.max(np.abs(np.asarray(decoded) - w))
    flushed = 127 * float(np.finfo(np.float32).tiny)
    for size in (1e-45, 1e-39, 2e-38, 1e-36):
        small = np.asarray(size * np.asarray(w, np.float64), np.float32)
        decoded = np.asarray(eqq.quantize(small, format).dequantize(), np.float64)
        assert np.all(np.isfinite(decoded))
        assert np.max(np.abs(decoded - small)) <= 1.01 * size * error + flushed


@pytest.mark.examples(2)
@native_formats
def test_huge(format):
    w = np.random.default_rng(0).uniform(-1, 1, (130, 5)).astype(np.float32)
    expected = eqq.quantize(w, format).dequantize()
    decoded = eqq.quantize(w * np.float32(2.0**127), format).dequantize()
    decoded = np.asarray(decoded, np.float64) / 2.0**127
    np.testing.assert_allclose(decoded, expected, rtol=1e-5)


#
# Quantizing again what was decoded
#


def again(format, array, seed):
    shape, axis, dtype = array
    q = eqq.quantize(weight(shape, dtype, seed), format, axis=axis)
    return q, eqq.quantize(q.dequantize(), format, axis=axis)


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "format", [eqq.NF4(64), eqq.NF4(32, jnp.bfloat16), eqq.NF4(None)]
)
@settings(max_examples=8)
@given(array=arrays, seed=seeds)
def test_again_nf4(format, array, seed):
    q, new = again(format, array, seed)
    assert trees_equal(q, new)


@pytest.mark.examples(2)
@pytest.mark.parametrize("format", [eqq.Int8(), eqq.Int8(32), eqq.Int4(64)])
@settings(max_examples=8)
@given(array=arrays, seed=seeds)
def test_again_integers(format, array, seed):
    q, new = again(format, array, seed)
    np.testing.assert_array_equal(q.stored["codes"], new.stored["codes"])
    np.testing.assert_array_max_ulp(scales(q), scales(new), 1)


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "format", [eqq.Ternary(), eqq.Ternary(48), eqq.Ternary(scale="tensor")]
)
@settings(max_examples=8)
@given(array=arrays, seed=seeds)
def test_again_absmean(format, array, seed):
    # The new mean counts the zeros, and nothing exceeds the old one.
    q, new = again(format, array, seed)
    np.testing.assert_array_equal(q.stored["codes"], new.stored["codes"])
    assert np.all(scales(new) <= scales(q) * (1 + rounding(q)))


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "format", [eqq.Ternary(128, rule="threshold"), eqq.Binary(), eqq.Binary(128)]
)
@settings(max_examples=8)
@given(array=arrays, seed=seeds)
def test_again_mean_of_equals(format, array, seed):
    q, new = again(format, array, seed)
    np.testing.assert_array_equal(q.stored["codes"], new.stored["codes"])
    np.testing.assert_allclose(scales(q), scales(new), rtol=rounding(q))


@settings(max_examples=8)
@given(array=arrays, seed=seeds)
def test_again_affine(array, seed):
    # The range of what was decoded may be a step narrower than that of the weight.
    q, new = again(eqq.Int4(64, symmetric=False), array, seed)
    old = rows(q.dequantize(), q.axis)
    difference = np.abs(rows(new.dequantize(), q.axis) - old)
    step = np.repeat(scales(q), 64, axis=-1)[..., : old.shape[-1]]
    assert np.all(difference <= 0.501 * step + rounding(q) * np.abs(old))


@settings(max_examples=8)
@given(array=arrays, seed=seeds)
def test_again_nested(array, seed):
    # A scale moves by half a step of its own format, 1/254 of the largest. A number
    # moves by that, and by half the widest gap of the codebook.
    q, new = again(eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32)), array, seed)
    gap = np.max(np.diff(eqq.NF4.codebook))
    old = rows(q.dequantize(), q.axis)
    difference = np.abs(rows(new.dequantize(), q.axis) - old)
    largest = np.max(np.abs(old), axis=-1, keepdims=True)
    assert np.all(difference <= largest * (1 / 254 + gap / 2 + 2 * rounding(q)))
