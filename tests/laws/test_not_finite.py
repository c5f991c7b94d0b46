import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import AbstractGrid

from ..helpers import all_formats, error, formats, grids, normal
from ..kernels.every import every_product, kernels


# What is not finite, in a weight or an input, comes out of every kernel as of the
# product with the decoded weight: the same NaNs, the same infinities, and right numbers
# elsewhere.


@pytest.fixture(autouse=True)
def every_size(monkeypatch):
    """Kernels that round do small weights, too."""
    monkeypatch.setattr("eqquant.kernels.cpu._tiles._rounding_size", 0)


@jax.jit(static_argnums=1)
def traced(w, format):
    return eqq.quantize(w, format)


def weight(format, k=141, n=24):
    """With numbers that are not finite where a format can have them. Some columns are
    of one sign, so that infinities add up."""
    w = np.array(normal(k, n, seed=3))
    w[:, 8:16] = np.abs(w[:, 8:16]) + 0.5
    w[70, 0], w[3, 1], w[140, 2] = np.nan, np.inf, -np.inf
    q = traced(jnp.asarray(w), format)
    if not isinstance(format, AbstractGrid) or q.stored["scale"].shape[-1] != n:
        return q
    # By the bits of the scales, among them those of NaNs that rounding would overflow.
    bits = np.array(q.stored["scale"])
    dtype = np.dtype(format.scale_dtype)
    wild = np.array([np.nan, np.inf, -np.inf, 0.0] * 2, dtype).view(bits.dtype)
    bits[-1, 4:12] = wild
    bits[0, 16:18] = np.iinfo(bits.dtype).max, np.iinfo(bits.dtype).max // 2
    stored = q.stored | {"scale": jnp.asarray(bits)}
    return jax.tree.unflatten(jax.tree.structure(q), jax.tree.leaves(stored))


def inputs(k, m):
    x = np.array(normal(m, k, seed=4))
    x[0] = np.abs(x[0]) + 0.5
    x[1, 5:9] = 0
    x[2 % m, 7] = np.inf
    x[3 % m, 11] = -np.inf
    if m > 4:
        x[4, 1] = np.nan
        x[5, 2:4] = np.inf, -np.inf
        x[6] = 0
        x[7, :] = np.inf
        x[8, 2:20:3] = np.inf
        x[9, 5] = 1e6
    return jnp.asarray(x)


def check(y, x, w, bound):
    x, w, y = (np.asarray(a, np.float64) for a in (x, w, y))
    with np.errstate(invalid="ignore"):
        expected = x @ w
        near = bound * (np.abs(x) @ np.abs(w))
        difference = np.abs(y - expected)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(expected))
    wild = np.isinf(expected) | np.isinf(y)
    np.testing.assert_array_equal(y[wild], expected[wild])
    finite = np.isfinite(expected)
    assert np.all(difference[finite] <= near[finite])


@pytest.mark.examples(3)
@all_formats
def test_as_of_the_decoded_weight(format):
    _as_of_the_decoded_weight(2, format)


# Kernels for many rows.
@pytest.mark.examples(2)
@grids
def test_of_many_rows(format):
    _as_of_the_decoded_weight(33, format)


def _as_of_the_decoded_weight(m, format):
    q = weight(format)
    dense = np.asarray(q.dequantize())
    for q, w in ((q, dense), (q.T, dense.T)):
        x = inputs(q.shape[0], m)
        bounds = {kernel.name: kernel.error for kernel in kernels(x, q)}
        for name, y in every_product(x, q).items():
            check(y, x, w, max(bounds[name], 1e-5))


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", (eqq.RSRBinary(8), eqq.RSRTernary(5)), ids=str)
@pytest.mark.parametrize("m", (2, 33))
def test_exact_formats(format, m):
    w = normal(141, 24)
    q = eqq.quantize(jnp.where(w < 0, float(format.domain[0]), jnp.sign(w)), format)
    dense = np.asarray(q.dequantize())
    for q, w in ((q, dense), (q.T, dense.T)):
        x = inputs(q.shape[0], m)
        for y in every_product(x, q).values():
            check(y, x, w, 1e-5)


# Likewise the derivative: it is the product with the transposed weight.
@pytest.mark.parametrize("name", ("nf4", "int8", "ternary-48"))
def test_cotangents(name):
    q = weight(formats[name])
    x, ct = normal(33, 141), inputs(24, 33)
    (found,) = jax.jit(lambda x, ct, q: jax.vjp(lambda x: x @ q, x)[1](ct))(x, ct, q)
    check(found, ct, q.T.dequantize(), 8e-3)


# Where all is finite, nothing is computed twice: no other row changes a number.
def test_rows_are_apart():
    q = eqq.quantize(normal(141, 24), "int8")
    x = inputs(141, 33).at[9].set(1.0)
    calm = jnp.where(jnp.all(jnp.isfinite(x), axis=1, keepdims=True), x, 0)
    bounds = {kernel.name: kernel.error for kernel in kernels(x, q)}
    for name, y in every_product(x, q).items():
        z = every_product(calm, q)[name]
        rows = np.all(np.isfinite(x), axis=1)
        np.testing.assert_array_equal(y[rows], z[rows])
        assert error(z, calm, q.dequantize()) < max(1e-3, bounds[name])


# `implicit` multiplies the scales of a weight by a constant.
@pytest.mark.examples(3)
@all_formats
def test_multiples(format):
    q = weight(format)
    for fn in (lambda w: 0.5 * w, lambda w: -w, lambda w: w / 4):
        y = eqq.implicit(fn)(q)
        y = y.dequantize() if eqq.is_quantized(y) else y
        np.testing.assert_array_equal(y, fn(q.dequantize()))
