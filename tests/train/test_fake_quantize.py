import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import fake_quantize

from ..helpers import normal


def reference(x, bits, per, symmetric):
    x = np.asarray(x, np.float64)
    axis = -1 if per == "token" else None
    low = np.minimum(x.min(axis, keepdims=True), 0)
    high = np.maximum(x.max(axis, keepdims=True), 0)
    if symmetric:
        last = 2 ** (bits - 1) - 1
        scale = np.maximum(-low, high) / last
        return np.clip(np.round(x / scale), -last, last) * scale
    scale = (high - low) / (2**bits - 1)
    zero = np.round(-low / scale)
    return (np.clip(np.round(x / scale) + zero, 0, 2**bits - 1) - zero) * scale


@pytest.mark.parametrize("bits", (2, 4, 8))
@pytest.mark.parametrize("per", ("token", "tensor"))
@pytest.mark.parametrize("symmetric", (True, False))
@pytest.mark.parametrize("shift", (0, 10))
def test_definition(bits, per, symmetric, shift):
    x = shift + normal(3, 7, 40) * jnp.arange(1.0, 8.0)[None, :, None]
    fn = lambda x: fake_quantize(x, bits, per=per, symmetric=symmetric)
    y, tangent = jax.jvp(fn, (x,), (x,))
    expected = reference(x, bits, per, symmetric)
    # Of numbers half-way between two integers, few go the other way.
    near = np.isclose(y, expected, rtol=1e-5, atol=1e-5)
    assert near.mean() > 0.998
    assert np.array_equal(tangent, x)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(x * fn(x))))(x)
    np.testing.assert_allclose(gradient, x + y, rtol=1e-6)


def test_as_a_format():
    x = normal(5, 70)
    expected = eqq.quantize(x, "int8", axis=-1).dequantize()
    assert np.array_equal(fake_quantize(x), expected)
    assert np.array_equal(jax.vmap(fake_quantize)(x), expected)


def test_corners():
    assert not fake_quantize(jnp.zeros((3, 4)), symmetric=False).any()
    x = normal(3, 40).at[1, 2].set(jnp.nan)
    y = fake_quantize(x)
    assert jnp.isnan(y[1]).all() and jnp.isfinite(y[jnp.array([0, 2])]).all()
    assert jnp.isnan(fake_quantize(x, per="tensor")).all()
    # What only has one sign uses all of the integers, and zero stays zero.
    x = jnp.linspace(0.0, 1.0, 16)
    np.testing.assert_allclose(fake_quantize(x, 4, symmetric=False), x, atol=1e-6)
    for dtype in (jnp.bfloat16, jnp.float16):
        assert fake_quantize(normal(3, 4, dtype=dtype)).dtype == dtype
    # The scale is computed in float32.
    tiny = jnp.full((1, 4), 1e-5, jnp.float16)
    assert np.array_equal(fake_quantize(tiny), tiny)


def test_errors():
    x = normal(3, 4)
    with pytest.raises(ValueError, match="`bits` should be an integer from 2.*1"):
        fake_quantize(x, 1)
    with pytest.raises((ValueError, TypeError), match="per"):
        fake_quantize(x, per="row")
    with pytest.raises(TypeError, match="`x` should be a floating-point.*int32"):
        fake_quantize(jnp.arange(3))
