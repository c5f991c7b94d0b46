"""Native kernels of weights in trellis codes, at every level."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
import eqquant.kernels.native._library as library

from ..helpers import error, normal
from .levels import available
from .test_native_strange import check_infinities, kernels, products


pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)


@pytest.fixture(params=available)
def at_level(request, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", request.param)


def weight(format, k, n, *lead, scales=None):
    """A weight of any codes, since any words are codes. `x @ q` contracts `k`."""
    rng = np.random.default_rng(k + n)
    words = rng.integers(0, 2**32, (*lead, -(-k // 32) * format.bits, n), np.uint32)
    scales = rng.uniform(0.5, 2, n) if scales is None else scales
    scales = np.broadcast_to(scales, (*lead, 1, n)).astype(format.scale_dtype)
    bits = {2: np.uint16, 4: np.uint32}[scales.dtype.itemsize]
    stored = {"codes": jnp.asarray(words), "scale": jnp.asarray(scales.view(bits))}
    q = eqq.quantize(jnp.ones((k, 1)), format)
    return dataclasses.replace(q, stored=stored)


def dense(q):
    return np.asarray(q.dequantize(), np.float64)


# Every number of bits, with the tails of vectors, words, tiles and sums in float32.
@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "bits, states, k, n",
    ((1, 8, 1, 1), (2, 16, 300, 67), (3, 13, 513, 530), (4, 16, 640, 530))
    + ((5, 9, 95, 130), (6, 16, 2400, 17), (7, 12, 4500, 70), (8, 16, 257, 1100)),
)
def test_products(bits, states, k, n, at_level):
    dtype = (jnp.float16, jnp.bfloat16, jnp.float32)[bits % 3]
    q = weight(eqq.Trellis(bits, states=states, scale_dtype=dtype), k, n)
    large = k * n >= 2**18
    integers = large and library.has("trellis_int16")
    for q, wanted in ((q, {"native_trellis_integers"}), (q.T, set())):
        wanted = {"native_trellis"} | (wanted if integers else set())
        for m in (1, 2, 3, 8, 37, 131):
            x = normal(m, q.shape[0], seed=1)
            found = list(products(x, q))
            assert {kernel.name for kernel, _ in found} == wanted
            for kernel, y in found:
                exact = kernel.name == "native_trellis"
                bound = min(kernel.error, 2e-6 if exact else 1)
                assert error(y, x, dense(q)) < bound, (kernel.name, m)


@pytest.mark.examples(1)
def test_operands_that_are_not_finite(at_level):
    format = eqq.Trellis(3, scale_dtype=jnp.float32)
    scales = np.ones(530)
    scales[[1, 7, 8, 529]] = np.nan, np.inf, 0, np.nan
    q = weight(format, 601, 530, scales=scales)
    x = normal(20, 601, seed=1).at[3, 5].set(jnp.nan).at[7, 70].set(jnp.inf)
    x = x.at[8, 100:300].set(-jnp.inf).at[9, 70].set(jnp.inf).at[9, 90].set(-jnp.inf)
    check_infinities(x, q)
    for m in (2, 3, 7, 8, 9):
        check_infinities(x[m : m + 1], q)
    x = normal(20, 530, seed=1).at[3, 5].set(jnp.nan).at[7, 70].set(jnp.inf)
    check_infinities(x, q.T)


# Sums of points overflow where sums of numbers do not.
@pytest.mark.examples(1)
def test_huge_and_tiny(at_level):
    format = eqq.Trellis(2, scale_dtype=jnp.float32)
    for of_x, of_w in ((1e36, 1e-30), (1e-30, 1e30)):
        q = weight(format, 600, 530, scales=of_w)
        for m in (1, 5):
            x = of_x * normal(m, 600, seed=1)
            for kernel, y in products(x, q):
                assert error(y, x, dense(q)) < kernel.error, kernel.name


# Inputs far above the others of their row, and rows with many of those.
@pytest.mark.examples(1)
def test_outliers(at_level):
    q = weight(eqq.Trellis(3), 640, 530)
    x = np.array(normal(9, 640, seed=1))
    x[1, ::50] *= 300
    x[2, ::3] *= 300
    x[4, 639] = -1e4
    x[5] = 0
    for kernel, y in products(x, q):
        assert error(y, x, dense(q)) < kernel.error, kernel.name


# Many equal terms, whose sums are rounded in one direction.
@pytest.mark.examples(1)
def test_long_sums(at_level):
    for k, n, across in ((20000, 18, False), (20, 20000, True)):
        q = weight(eqq.Trellis(2), k, n)
        words = jnp.zeros_like(q.stored["codes"])
        q = dataclasses.replace(q, stored=q.stored | {"codes": words})
        q = q.T if across else q
        for m in (1, 3):
            x = jnp.full((m, 20000), np.float32(1.1))
            for kernel, y in products(x, q):
                assert error(y, x, dense(q)) < 1e-5, kernel.name


def test_stacks(at_level):
    format = eqq.Trellis(2, states=10)
    q = weight(format, 200, 70, 3)
    for q, k in ((q, 200), (q.mT, 70)):
        x = normal(3, 5, k, seed=1)

        @jax.jit
        def product(x, q):
            return eqq.qmatmul(x, q, kernel="native_trellis")

        each = jax.vmap(product)(x, q)
        for y, of_y, row, w in zip(each, product(x, q), x, dense(q), strict=True):
            np.testing.assert_array_equal(y, of_y)
            assert error(y, row, w) < 2e-6


def test_derivatives(at_level):
    q = weight(eqq.Trellis(2), 200, 70)
    x, dy = normal(4, 200, seed=1), normal(4, 70, seed=2)
    product = jax.jit(lambda x: eqq.qmatmul(x, q))
    y, of_dx = jax.jvp(product, (x,), (2 * x,))
    np.testing.assert_allclose(of_dx, 2 * y, rtol=1e-6)
    (dx,) = jax.vjp(product, x)[1](dy)
    assert error(dx, dy, dense(q).T) < 2e-6


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_dtypes(dtype):
    q = weight(eqq.Trellis(4), 640, 530)
    for m in (1, 9):
        x = normal(m, 640, seed=1).astype(dtype)
        for kernel, y in products(x, q):
            assert y.dtype == dtype
            bound = kernel.error + float(jnp.finfo(dtype).eps)
            assert error(y, x, dense(q)) < bound, kernel.name


def test_activations():
    q = eqq.quantize(normal(96, 40), eqq.Trellis(2, states=8), activation=eqq.Int8())
    x = normal(3, 96, seed=1)
    y = eqq.qmatmul(x, q, kernel="native_trellis")
    rounded = eqq.quantize(x, eqq.Int8(), axis=-1).dequantize()
    assert error(y, rounded, dense(q)) < 2e-6


# Where the library is, it multiplies trellis codes; and by integers only where that
# keeps the precision.
def test_choice():
    q = weight(eqq.Trellis(3), 1024, 512)
    for m in (1, 4, 16, 128):
        x = jnp.ones((m, 1024))
        assert eqq.explain(x, q).kernel in ("native_trellis", "native_trellis_integers")
        x = jnp.ones((m, 512))
        # (Across the rows, XLA is as fast with many rows of inputs.)
        assert m > 16 or eqq.explain(x, q.T).kernel == "native_trellis"
    q = weight(eqq.Trellis(3), 512, 511)
    assert {k.name for k in kernels(jnp.ones((64, 512)), q)} == {"native_trellis"}
