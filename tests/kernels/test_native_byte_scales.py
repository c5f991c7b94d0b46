"""Scales that are stored in a byte each, as the native kernels read them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
import eqquant.kernels._table as table
import eqquant.kernels.native._library as library

from ..helpers import error, normal
from .levels import available


pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)

over_formats = pytest.mark.parametrize(
    "format",
    (eqq.MXFP4(), eqq.MXFP8(), eqq.NVFP4(), eqq.NVFP4(inverse=True)),
    ids=str,
)


def dense(q):
    return np.asarray(q.dequantize(), np.float64)


def products(x, q):
    """The error that each native kernel may have, and what it computes."""
    problem = eqq.explain(x, q).problem
    every = [k for k in table.supporting(problem) if k.name.startswith("native")]
    assert every
    of = lambda x, q: [eqq.qmatmul(x, q, kernel=k.name) for k in every]
    return zip([k.bound(problem) for k in every], jax.jit(of)(x, q))


@pytest.mark.examples(6)
@over_formats
@pytest.mark.parametrize("level", available)
def test_products(format, level, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", level)
    q = eqq.quantize(normal(640, 70), format)
    for m in (1, 5, 20):
        for x, w in ((normal(m, 640, seed=1), q), (normal(m, 70, seed=1), q.T)):
            for most, y in products(x, w):
                assert error(y, x, dense(w)) < most


# The scale of a matrix times that of a block is of a usual size, though either is not.
@pytest.mark.examples(3)
@pytest.mark.parametrize("inverse", (False, True))
@pytest.mark.parametrize("factor", (1e-37, 3e-20, 1e30, 1e38))
def test_small_and_large_factors(factor, inverse):
    large = (factor > 1) == inverse
    code, scale = (0x7E, 448.0) if large else (1, 2.0**-9)
    number = np.float32(factor)
    q = eqq.quantize(normal(640, 70), eqq.NVFP4(inverse=inverse))
    ones = replaced(replaced(q, "scale", np.uint8(0x38)), "global_scale", np.float32(1))
    q = replaced(replaced(q, "scale", np.uint8(code)), "global_scale", number)
    w = dense(ones) * scale * np.float64(number) ** (-1 if inverse else 1)
    for m in (1, 3, 40):
        x = normal(m, 640, seed=1) * (1 if np.max(np.abs(w)) < 1 else np.float32(1e-3))
        for most, y in products(x, q):
            assert error(y, x, w) < most


def replaced(q, name, value):
    old = q.stored[name]
    new = np.broadcast_to(value, old.shape).view(old.dtype)
    return eqx.tree_at(lambda q: q.stored[name], q, jnp.asarray(new))


# Of the scales, nothing is computed before the kernel runs.
@pytest.mark.examples(2)
@over_formats
@pytest.mark.optimized
def test_scales_are_read_as_they_are_stored(format):
    q = eqq.quantize(normal(640, 72), format)
    program = jax.jit(lambda x, q: x @ q).lower(normal(1, 640), q).compile()
    shape = f"[{640 // format.block_size},72]"
    assert f"u8{shape}" in program.as_text()
    assert f"16{shape}" not in program.as_text()
    assert f"32{shape}" not in program.as_text()


# (Smaller numbers have scales that are not normal.)
@pytest.mark.examples(2)
@over_formats
@pytest.mark.parametrize("size", (1e-30, 1e30))
def test_small_and_large_numbers(format, size):
    q = eqq.quantize(np.float32(size) * normal(320, 24), format)
    x = normal(3, 320, seed=1)
    assert error(x @ q, x, dense(q)) < 1e-5


# With NaN. (Subnormal numbers may be flushed to zero; and in columns where weights
# overflow, zeros times these are NaN in the product with decoded weights alone.)
@over_formats
def test_every_scale(format):
    size = format.block_size
    q = eqq.quantize(normal(size, 256), format)
    codes = jnp.arange(256, dtype=jnp.uint8).reshape(1, 256)
    q = eqx.tree_at(lambda q: q.stored["scale"], q, codes)
    found = np.asarray(jnp.eye(size, dtype=jnp.float32)[:1] @ q)[0]
    w = dense(q)
    known = ~np.any(np.isinf(w), axis=0) & ~(np.abs(w[0]) < 2.0**-120)
    np.testing.assert_allclose(found[known], w[0, known], rtol=3e-7)
    assert np.any(np.isnan(w[0])) and np.sum(known) > 100


# Under `vmap`, each matrix has the scales, and the factor, of its own.
@over_formats
def test_stacks(format):
    w = normal(3, 160, 24) * np.float32([1, 100, 1e-4])[:, None, None]
    q = jax.vmap(lambda w: eqq.quantize(w, format))(w)
    x = normal(3, 2, 160, seed=1)
    found = jax.vmap(lambda x, q: x @ q)(x, q)
    for y, x, w in zip(found, x, dense(q)):
        assert error(y, x, w) < 1e-5


# Rows of several matrices that were joined have the factors of these.
def test_joined():
    parts = [eqq.quantize(s * normal(24, 160), "nvfp4", axis=-1) for s in (1, 100)]
    q = eqq.implicit(jnp.concatenate)(parts)
    assert isinstance(q, eqq.QuantizedArray)
    x = normal(2, 160, seed=1)
    assert error(x @ q.T, x, dense(q.T)) < 1e-5
