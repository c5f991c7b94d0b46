import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import LoRA

from ..helpers import error, main_formats, normal, trees_equal


n, k, rank, scale = 40, 70, 3, 0.5


def adapted(base, axis, dora=False, stack=()):
    """A `LoRA` of random adapters, and the array that it is defined to be."""
    a = normal(*stack, rank, k, seed=1)
    b = normal(*stack, n, rank, seed=2)
    w = base.astype(jnp.float32)
    w = np.asarray(w.dequantize() if eqq.is_quantized(w) else w, np.float64)
    rows = w if axis == -1 else np.swapaxes(w, -1, -2)
    norm = np.sum(rows**2, axis=-1).astype(np.float32)
    magnitude = 1 + normal(*stack, n, seed=3) ** 2 if dora else None
    bits = jnp.asarray(norm.view(np.uint32)) if dora else None
    full = rows + scale * np.asarray(b, np.float64) @ np.asarray(a, np.float64)
    if dora:
        full = full * (magnitude / np.linalg.norm(full, axis=-1))[..., None]
    full = np.asarray(full if axis == -1 else np.swapaxes(full, -1, -2))
    return LoRA(base, a, b, magnitude, bits, axis=axis, scale=scale), full


def weight(axis, *stack, dtype=np.float32):
    w = normal(*stack, n, k, dtype=dtype)
    return w if axis == -1 else w.mT


@jax.jit
def products(w, x, y):
    """Each kind of product, by vectors, matrices and stacks of them."""
    left = [x[0, 0] @ w, x[0] @ w, x @ w]
    right = [w @ y[0, 0], w @ y[0].mT, w @ y.mT]
    return left + right + [w.mT @ x[0].mT, y[0] @ w.T]


def assert_products(w, full):
    x = normal(2, 5, w.shape[0], seed=4)
    y = normal(2, 5, w.shape[1], seed=5)
    expected = products(jnp.asarray(full, jnp.float32), x, y)
    for found, wanted in zip(products(w, x, y), expected, strict=True):
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=2e-4)


@pytest.mark.examples(2)
@main_formats
def test_formats(format):
    base = eqq.quantize(weight(-1), format, axis=-1)
    w, full = adapted(base, -1, dora=True)
    assert (w.shape, w.dtype, w.ndim, w.size) == (full.shape, base.dtype, 2, full.size)
    x, y = normal(5, n, seed=4), normal(5, k, seed=5)
    left, right = jax.jit(lambda w, x, y: (x @ w, y @ w.T))(w, x, y)
    assert error(left, x, full) < 2e-6
    assert error(right, y, full.T) < 2e-6
    np.testing.assert_allclose(w.dequantize(), full, atol=1e-5)


@pytest.mark.examples(3)
@pytest.mark.parametrize("quantized", (False, True))
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("dora", (False, True))
def test_products(dora, axis, quantized):
    base = weight(axis)
    base = eqq.quantize(base, axis=axis) if quantized else base
    w, full = adapted(base, axis, dora)
    assert_products(w, full)
    np.testing.assert_allclose(w.dequantize(), full, atol=1e-5)
    np.testing.assert_allclose(w.mT.dequantize(), full.T, atol=1e-5)
    assert trees_equal(w.mT.mT, w)


@pytest.mark.examples(1)
@pytest.mark.parametrize("quantized", (False, True))
@pytest.mark.parametrize("dora", (False, True))
def test_dtypes(dora, quantized):
    base = weight(-1, dtype=jnp.bfloat16)
    base = eqq.quantize(base, axis=-1) if quantized else base
    w, full = adapted(base, -1, dora)
    assert w.dtype == w.dequantize().dtype == w[3].dtype == jnp.bfloat16
    x = normal(5, k, dtype=jnp.bfloat16)
    y = x @ w.T
    assert y.dtype == jnp.bfloat16
    assert error(y, x, full.T) < 0.02
    wide = w.astype(jnp.float32)
    assert wide.dtype == wide.dequantize().dtype == jnp.float32
    y = x.astype(jnp.float32) @ wide.T
    assert y.dtype == jnp.float32
    assert error(y, x, full.T) < 2e-6


@pytest.mark.thorough
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("dora", (False, True))
def test_stacks(dora, axis):
    base = eqq.quantize(weight(axis, 4), "int8", axis=axis)
    w, full = adapted(base, axis, dora, stack=(4,))
    x = normal(4, 5, full.shape[-2], seed=4)
    expected = x @ jnp.asarray(full, jnp.float32)
    close = lambda y, expected: np.testing.assert_allclose(y, expected, atol=2e-4)
    close(x @ w, expected)
    close(jax.vmap(lambda w, x: x @ w)(w, x), expected)
    close(jax.lax.map(lambda wx: wx[1] @ wx[0], (w, x)), expected)
    close(jnp.stack([x @ w for w, x in zip(w, x)]), expected)
    close(x[:, None] @ w[:, None], expected[:, None])
    close(x[1] @ w, x[1] @ jnp.asarray(full, jnp.float32))
    close(x[1, 0] @ w, x[1, 0] @ jnp.asarray(full, jnp.float32))
    assert isinstance(w[1:3], LoRA) and w[1:3].shape == (2, *full.shape[1:])
    close(w[jnp.array([2, 0])].dequantize(), full[[2, 0]])
    with pytest.raises(ValueError, match="`.mT`"):
        w.T


@pytest.mark.examples(1)
@pytest.mark.parametrize("quantized", (False, True))
@pytest.mark.parametrize("dora", (False, True))
def test_rows(dora, quantized):
    base = eqq.quantize(weight(-1), axis=-1) if quantized else weight(-1)
    w, full = adapted(base, -1, dora)
    for index in (3, jnp.array(3), jnp.array([[1, 2], [0, 1]]), slice(2, 5), (1, 2)):
        np.testing.assert_allclose(w[index], full[index], atol=1e-5)
    mask = np.arange(n) % 2 == 0
    np.testing.assert_allclose(w[mask], full[mask], atol=1e-5)
    np.testing.assert_allclose(w.T[3], full.T[3], atol=1e-5)
    assert len(w) == len(list(w)) == n


# By the definition, in float64: the derivative of `sum(c * (x @ W.T))`.
@pytest.mark.examples(3)
@pytest.mark.parametrize("quantized", (False, True))
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("dora", (False, True))
def test_gradients(dora, axis, quantized):
    base = weight(axis)
    base = eqq.quantize(base, axis=axis) if quantized else base
    w, full = adapted(base, axis, dora)
    x, c = normal(6, k, seed=6), normal(6, n, seed=7)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(wx):
        w, x = wx
        y = x @ w.T if axis == -1 else (w.T @ x.T).T
        return jnp.sum(c * y)

    found, dx = gradient((w, x))
    rows = full if axis == -1 else full.T
    a, b, x, c = (np.asarray(z, np.float64) for z in (w.a, w.b, x, c))
    gain = np.ones(n)
    if dora:
        # That the norm counts as constant is part of the definition.
        gain = np.linalg.norm(rows, axis=-1)
        unscaled = rows / gain[:, None]
        np.testing.assert_allclose(
            found.magnitude, np.sum(c * (x @ unscaled.T), axis=0), rtol=1e-3, atol=1e-3
        )
        before = np.asarray(base.dequantize() if quantized else base, np.float64)
        before = (before if axis == -1 else before.T) + scale * b @ a
        gain = gain / np.linalg.norm(before, axis=-1)
    np.testing.assert_allclose(
        found.a, scale * (gain[:, None] * b).T @ c.T @ x, 1e-3, 1e-3
    )
    np.testing.assert_allclose(found.b, scale * (c * gain).T @ x @ a.T, 1e-3, 1e-3)
    np.testing.assert_allclose(dx, c @ rows, 1e-3, 1e-3)
    if not quantized:
        assert np.all(np.asarray(found.base) == 0)


def test_higher_derivatives():
    w, full = adapted(eqq.quantize(weight(-1), axis=-1), -1)
    full = jnp.asarray(full, jnp.float32)
    x = normal(k, seed=6) / k
    f = lambda w: lambda x: jnp.sum(jnp.tanh(w @ x) ** 2)
    hvp = lambda w: jax.jvp(jax.grad(f(w)), (x,), (x,))[1]
    np.testing.assert_allclose(hvp(w), hvp(full), rtol=1e-4, atol=1e-5)


def test_not_arrays():
    w, _ = adapted(weight(-1), -1)
    for use in (lambda: w @ "x", lambda: "x" @ w):
        with pytest.raises(TypeError, match="unsupported operand"):
            use()
    with pytest.raises((ValueError, TypeError)):
        normal(5, k + 1) @ w.T
