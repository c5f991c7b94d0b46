"""JAX's tools that look for NaNs find those that there are, and no others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import checkify

import eqquant as eqq

from ..helpers import all_formats, normal


def weight(format):
    """With blocks, columns and rows of zeros, and a column of equal numbers."""
    w = np.array(normal(128, 4))
    w[:64, 0] = w[:, 1] = w[7] = 0
    w[:, 2] = 0.5
    exact = isinstance(format, eqq.formats.AbstractExact)
    return jnp.asarray(np.sign(w) if exact else w)


# Not even on the way, where a `where` takes it out again.
@pytest.mark.examples(1)
@all_formats
def test_no_nan_on_the_way(format):
    w = weight(format)
    with jax.debug_nans(True), jax.disable_jit(True):
        q = eqq.quantize(w, format)
        q.dequantize()


# Nor is anything divided by zero.
@pytest.mark.examples(2)
@all_formats
def test_checkify_reports_nothing(format):
    fn = lambda w: eqq.quantize(w, format).dequantize()
    error, _ = checkify.checkify(fn, errors=checkify.float_checks)(weight(format))
    assert error.get() is None


def test_zero_point_of_zeros():
    fn = lambda w: eqq.quantize(w, eqq.Int(4, 64, "zero_point")).dequantize()
    checked = jax.jit(checkify.checkify(fn, errors=checkify.float_checks))
    error, _ = checked(normal(64, 8).at[:, 3].set(0))
    assert error.get() is None


def test_straight_through():
    with jax.debug_nans(True), jax.disable_jit(True):
        fn = lambda w: jnp.sum(eqq.straight_through(w, "nf4") ** 2)
        assert np.all(np.isfinite(jax.grad(fn)(normal(64, 4))))


q = eqq.quantize(normal(64, 16), "nf4")
stack = eqq.quantize(normal(2, 64, 16), "int8")
products = {
    "matmul": lambda x: x @ q,
    "left": lambda x: (q.mT @ x.mT).mT,
    "reference": lambda x: eqq.qmatmul(x, q, kernel="reference"),
    "implicit": lambda x: eqq.implicit(jnp.matmul)(x, q),
    "vmap": jax.vmap(lambda x: x @ q),
    "vjp": lambda x: jax.vjp(lambda y: y @ q.mT, x[:, :16])[1](x),
    "jit": jax.jit(lambda x: x @ q),
}


@pytest.mark.parametrize("disable", (False, True))
@pytest.mark.parametrize("name", products)
def test_debug_nans(name, disable):
    x = np.full((3, 64), np.inf, np.float32)
    with jax.debug_nans(True), jax.disable_jit(disable):
        products[name](np.ones_like(x))
        with pytest.raises(FloatingPointError, match="nan.*qmatmul"):
            products[name](x)


# JAX keeps to itself what `checkify` checks of a primitive: it finds what comes of it.
def test_checkify_after_a_product():
    fn = lambda x: jnp.tanh(x @ q)
    checked = jax.jit(checkify.checkify(fn, errors=checkify.nan_checks))
    assert checked(jnp.ones((3, 64)))[0].get() is None
    assert "tanh" in checked(jnp.full((3, 64), jnp.inf))[0].get()


def test_rows():
    table = eqq.quantize(normal(8, 16), "int8", axis=-1)
    with jax.debug_nans(True), jax.disable_jit(True):
        eqq.qtake(table, np.array([1, 3]))
        with pytest.raises(FloatingPointError):
            eqq.qtake(table, np.array([1, 9]))


def test_debug_infs():
    with jax.debug_infs(True), pytest.raises(FloatingPointError, match="qmatmul"):
        np.full((3, 64), 3e38, np.float32) @ stack[0]
