"""Operands that take care: not finite, huge, tiny, or far from the others of their row.
Of native kernels, at every level."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
import eqquant.kernels.native._library as library

from ..helpers import error, formats, normal
from .every import kernels as every_kernel
from .levels import available


pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)

names = ("nf4", "int4-affine", "int8", "int8-32", "ternary")


@pytest.fixture(params=available)
def at_level(request, monkeypatch):
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", request.param)


def kernels(x, q):
    """The native ones that do `x @ q`."""
    return [k for k in every_kernel(x, q) if k.name.startswith("native")]


def products(x, q):
    """What each kernel computes, compiled for the level of the environment."""

    @jax.jit
    def every(x, q):
        return [eqq.qmatmul(x, q, kernel=kernel.name) for kernel in kernels(x, q)]

    return zip(kernels(x, q), map(np.asarray, every(x, q)), strict=True)


def check_close(x, q):
    w = np.asarray(q.dequantize(), np.float64)
    for kernel, y in products(x, q):
        assert error(y, x, w) < kernel.error, kernel.name


def check_infinities(x, q):
    """Infinities and NaNs are those of the product with the dequantized weight."""
    x, w = np.asarray(x, np.float64), np.asarray(q.dequantize(), np.float64)
    with np.errstate(invalid="ignore"):
        wanted = x @ w
    finite = np.isfinite(wanted)
    assert not finite.all()
    size = np.where(np.isfinite(x), abs(x), 0) @ np.where(np.isfinite(w), abs(w), 0)
    for kernel, y in products(x, q):
        strange = np.where(finite, 0, wanted)
        np.testing.assert_array_equal(np.where(np.isfinite(y), 0, y), strange)
        off = np.abs(y[finite] - wanted[finite])
        assert np.all(off <= kernel.error * size[finite])


def with_scales(q, change):
    """`q` with scales, which are of float32, that are changed."""
    scale = change(jax.lax.bitcast_convert_type(q.stored["scale"], jnp.float32))
    bits = jax.lax.bitcast_convert_type(scale, jnp.uint32)
    return eqx.tree_at(lambda q: q.stored["scale"], q, bits)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", names)
def test_inputs_that_are_not_finite(name, at_level):
    # Some of it is zero.
    w = normal(640, 530).at[5].set(0).at[70, ::2].set(0)
    x = normal(20, 640, seed=1).at[3, 5].set(jnp.nan).at[7, 70].set(jnp.inf)
    x = x.at[8, 100:300].set(-jnp.inf).at[9, 70].set(jnp.inf).at[9, 90].set(-jnp.inf)
    q = eqq.quantize(w, formats[name])
    check_infinities(x, q)
    check_infinities(x[7:8], q)
    check_infinities(x[7:10], eqq.quantize(w.T, formats[name]).T)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", names)
def test_scales_that_are_not_finite(name, at_level):
    def change(scale):
        blocks, columns = scale.shape
        scale = scale.at[0, 7 % columns].set(jnp.nan)
        return scale.at[blocks - 1, 20 % columns].set(jnp.inf)

    # (The last byte of a row may have digits that are no codes.)
    q = with_scales(eqq.quantize(normal(637, 530), formats[name]), change)
    for rows in (1, 3, 20):
        check_infinities(normal(rows, 637, seed=1), q)
    check_infinities(normal(3, 530, seed=1), q.T)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", names)
def test_sums_that_are_too_large_before_they_are_scaled(name, at_level):
    q = eqq.quantize(1e-3 * normal(640, 530), formats[name])
    for rows in (1, 3, 20):
        check_close(1e37 * normal(rows, 640, seed=1), q)
    check_close(1e-30 * normal(3, 640, seed=1), eqq.quantize(1e30 * q, formats[name]))


def test_inputs_that_are_too_large_once_they_are_scaled(at_level):
    w = normal(640, 530).at[:, 3].set(0).at[0, 3].set(1e30)
    q = eqq.quantize(w, "int8").T
    x = normal(3, 530, seed=1).at[:, 3].set(1e30)
    for _, y in products(x, q):
        assert np.isinf(y[:, 0]).all()
        assert error(y[:, 1:], x, q.dequantize()[:, 1:]) < 1e-5


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("int8", "int8-32", "int4-affine", "ternary"))
def test_inputs_that_are_far_from_the_others_of_their_row(name, at_level):
    rng = np.random.default_rng(0)
    w, x = np.array(normal(640, 530)), np.array(normal(40, 640, seed=1))
    # As many as a hundredth, which meet weights of zero in the first rows.
    w[::128] = 0
    x[:10, ::128] *= 1e6
    for row in x[10:20]:
        row[rng.choice(640, 6, replace=False)] *= 1e6
    x[20, ::5] *= 1e6
    x[21] *= 1e-30
    x[22] = 0
    x[23] *= 1e30
    x[24, 100:] = 0
    x[25, 7] = 1e-30
    x[26] = np.exp(5 * x[26])
    q = eqq.quantize(jnp.asarray(w), formats[name])
    check_close(jnp.asarray(x), q)
    has = library.has("int8")
    assert ("native_integers" in {kernel.name for kernel in kernels(x, q)}) == has


def test_a_bound_that_depends_on_the_weights_says_so():
    q = eqq.quantize(normal(640, 530), "int8")
    explained = eqq.explain(normal(20, 640), q)
    assert "integers" in explained.kernel
    text = " ".join(f"{explained}".split())
    assert "the weights are on average no smaller where" in text


def test_rounded_activations_that_are_not_finite(at_level):
    w = normal(640, 530).at[5].set(0).at[70, ::2].set(0)
    q = eqq.quantize(w, "int8", activation="int8")
    x = normal(70, 640, seed=1).at[3, 5].set(jnp.nan).at[7, 70].set(jnp.inf)
    wanted = np.asarray(eqq.qmatmul(x, q, kernel="reference"))
    assert "native_bytes" in {kernel.name for kernel in kernels(x, q)}
    for kernel, y in products(x, q):
        np.testing.assert_array_equal(np.isnan(y), np.isnan(wanted))
        if "bfloat16" in kernel.name:
            rows = np.isfinite(x).all(axis=1)
            assert error(y[rows], x[rows], q.dequantize()) < 1e-2, kernel.name
        else:
            np.testing.assert_allclose(y, wanted, rtol=1e-4, atol=1e-4)
