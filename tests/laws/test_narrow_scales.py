"""Scales of float16 and bfloat16 cost what their bits cost, and no more: however small
the numbers, the error is that of the format in float64 with scales of that dtype, those
that are subnormal included."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import from_bits, to_bits

from ..formats.reference import round_trip
from ..helpers import error, normal


narrow = (
    *(eqq.NF4(64, jnp.float16), eqq.Int8(32, jnp.float16)),
    *(eqq.Int4(64, True, jnp.float16), eqq.Int4(64, False, jnp.float16)),
    *(eqq.Binary(64, jnp.float16), eqq.Dynamic8(32, scale_dtype=jnp.float16)),
    eqq.Ternary(64, scale_dtype=jnp.float16),
    eqq.Ternary(64, rule="threshold", scale_dtype=jnp.float16),
    *(eqq.Int8(32, jnp.bfloat16), eqq.Int8(32), eqq.NF4(64, jnp.bfloat16)),
)
powers = (-7, -6, -5, -3.5, -2, 0, 3)


def sqnr(w, decoded):
    w, decoded = np.asarray(w, np.float64), np.asarray(decoded, np.float64)
    return 10 * np.log10(np.sum(w**2) / np.sum((decoded - w) ** 2))


@pytest.mark.examples(2)
@pytest.mark.parametrize("format", narrow, ids=str)
def test_as_the_reference(format):
    for power in powers:
        w = np.float32(10.0**power) * np.asarray(normal(64, 512))
        ours = sqnr(w, eqq.quantize(w, format, axis=-1).dequantize())
        assert abs(ours - sqnr(w, round_trip(w, format))) < 0.1


def test_as_known():
    # Scales in float32 have 45.4 dB.
    w = np.asarray(normal(64, 512))
    for size, least in ((3e-4, 45), (1e-5, 43.5), (1e-6, 35)):
        small = np.float32(size) * w
        q = eqq.quantize(small, eqq.Int8(32, jnp.float16), axis=-1)
        assert sqnr(small, q.dequantize()) > least


@pytest.mark.parametrize("dtype", (np.float16, jnp.bfloat16))
def test_every_scale(dtype):
    dtype = np.dtype(dtype)
    bits = np.arange(2**16, dtype=np.uint16)
    wanted = bits.view(dtype).astype(np.float32)
    jitted = jax.jit(to_bits, static_argnums=1)
    found = jax.jit(from_bits, static_argnums=1)(bits, dtype)
    small = np.abs(wanted) < np.finfo(np.float32).tiny
    np.testing.assert_array_equal(np.asarray(found)[~small], wanted[~small])
    # And back, to the last bit. (What is subnormal in float32 is flushed.)
    keep = np.isfinite(wanted) & (~small | (bits == 0))
    again = jitted(wanted, dtype)
    np.testing.assert_array_equal(np.asarray(again)[keep], bits[keep])
    # What is between two of them: the nearest; or the one above, of few bits.
    between = wanted[keep & (wanted > 0)]
    between = (between[1:] + np.diff(between) * 0.3 - np.diff(between)).astype("f4")
    found = np.asarray(jitted(between, dtype))
    found = found.view(dtype).astype(np.float64)
    assert np.all(found > 0) and np.all(found >= 0.995 * between)
    if dtype == np.float16:
        assert np.all(found >= 0.999 * between)
    for beyond in (np.inf, -np.inf, np.nan, 3.4e38, -3.4e38):
        found = np.asarray(jitted(np.full(1, beyond, np.float32), dtype))
        assert np.all(np.isnan(found.view(dtype)))


@pytest.mark.examples(2)
@pytest.mark.parametrize("format", [eqq.Int8(32, jnp.float16), eqq.NF4(64, "float16")])
@pytest.mark.parametrize("rows", [1, 40])
def test_products(format, rows):
    w, x = 1e-5 * normal(96, 256), normal(rows, 256, seed=1)
    q = eqq.quantize(w, format, axis=-1)
    assert np.min(np.abs(q.scale)) < 6e-5
    assert error(x @ q.T, x, np.asarray(q.dequantize()).T) < 1e-2
    exact = eqq.qmatmul(x, q.T, precision="highest")
    assert error(exact, x, np.asarray(q.dequantize()).T) < 1e-5
