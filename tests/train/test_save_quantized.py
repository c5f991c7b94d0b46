import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant.train import save_quantized

from ..helpers import formats, many_at_once, normal


key = jr.key(0)
mlp = eqx.nn.MLP(64, 64, 64, depth=5, activation=jnp.tanh, key=key)
x, y = normal(48, 64), normal(48, 64, seed=1)


def loss(model, x, wrap):
    for layer in model.layers:
        # (The layer as a default, and in the closure.)
        apply = lambda x, layer=layer: jnp.tanh(jax.vmap(layer)(x)) + 0 * layer.bias[0]
        x = wrap(apply)(x)
    return jnp.mean((x - y) ** 2)


def distance(a, b):
    a, b = (np.concatenate([x.ravel() for x in jtu.tree_leaves(t)]) for t in (a, b))
    return np.linalg.norm(a - b) / np.linalg.norm(b)


def test_values_and_gradients():
    grad = lambda wrap: eqx.filter_value_and_grad(loss)(mlp, x, wrap)
    value, wanted = grad(lambda fn: fn)
    found, near = grad(save_quantized)
    assert found == value
    assert 0 < distance(near, wanted) < 5e-3
    _, far = grad(lambda fn: save_quantized(fn, "int4"))
    assert distance(near, wanted) < distance(far, wanted) < 0.1
    # Nothing is kept in fewer bits.
    _, same = grad(lambda fn: save_quantized(fn, min_size=10**6))
    np.testing.assert_allclose(distance(same, wanted), 0, atol=1e-6)


# Whatever the format stores: at the rounded argument the gradient is the rounded one.
@pytest.mark.thorough
@many_at_once
def test_formats(names):
    x = normal(3, 1280)
    fn = lambda x: jnp.sum(x**2)

    @jax.jit
    def gradients(x):
        kept = {name: save_quantized(fn, formats[name]) for name in names}
        return {name: jax.grad(fn)(x) for name, fn in kept.items()}

    @jax.jit
    def rounded(x):
        arrays = {name: eqq.quantize(x, formats[name], axis=-1) for name in names}
        return eqq.tree_dequantize(arrays)

    found, wanted = gradients(x), rounded(x)
    for name in names:
        np.testing.assert_allclose(found[name], 2 * wanted[name], 1e-5, 1e-6)


# Exactly those at the rounded arguments, of a function of any trees.
def test_exact_at_what_was_kept():
    w = normal(64, 32, seed=2)
    q = eqq.quantize(normal(32, 64), "int8")
    step, cotangent = jnp.int32(3), normal(48, 64, seed=4)

    def fn(inputs, step, *, scale, name):
        a, b = inputs["a"], inputs["b"]
        out = jnp.sin(a) @ (w * scale) @ q * b[None] + step.astype(jnp.float32)
        return {name: out}, name, step + 1

    def run(fn, a, b, scale):
        out, name, step_after = fn({"a": a, "b": b}, step, scale=scale, name="y")
        assert name == "y" and step_after.dtype == jnp.int32
        return jnp.sum(cotangent * out["y"])

    a, b, scale = normal(48, 64), normal(64, seed=3), jnp.float32(0.1)
    saved = jax.grad(lambda *xs: run(save_quantized(fn), *xs), (0, 1, 2))
    rounded = eqq.quantize(a, eqq.Int8(32), axis=-1).dequantize()
    wanted = jax.grad(lambda *xs: run(fn, *xs), (0, 1, 2))(rounded, b, scale)
    for each in (saved, jax.jit(saved)):
        for found, exact in zip(each(a, b, scale), wanted, strict=True):
            np.testing.assert_allclose(found, exact, rtol=1e-4, atol=1e-4)


def test_transformations():
    w = normal(64, 64) / 8
    layer = save_quantized(lambda x: jnp.tanh(x @ w), min_size=1)
    plain = lambda x: jnp.tanh(x @ w)
    of = lambda f: jax.grad(lambda x: jnp.sum(f(x)))
    batch = normal(3, 16, 64)
    found = jax.vmap(of(layer))(batch)
    np.testing.assert_allclose(found, jax.vmap(of(plain))(batch), atol=0.02)

    def scanned(f):
        return lambda x: lax.scan(lambda x, _: (f(x), None), x, length=3)[0]

    found = of(scanned(layer))(batch[0])
    assert distance(found, of(scanned(plain))(batch[0])) < 0.01
    found = of(jax.checkpoint(layer))(batch[0])
    np.testing.assert_array_equal(found, of(layer)(batch[0]))


class Layer(eqx.Module):
    w: jax.Array

    @save_quantized
    def __call__(self, x):
        return jnp.tanh(x @ self.w)


# As a decorator, the module is an argument, but not one that is rounded.
def test_method():
    layer = Layer(normal(64, 64) / 8)
    of = lambda layer, x: jnp.sum(layer(x) ** 2)
    found = eqx.filter_grad(of)(layer, x)
    kept = eqq.quantize(x, eqq.Int8(32), axis=-1).dequantize()
    _, pullback = jax.vjp(lambda w: jnp.tanh(kept @ w), layer.w)
    (wanted,) = pullback(2 * jnp.tanh(x @ layer.w))
    np.testing.assert_allclose(found.w, wanted, rtol=1e-4, atol=1e-4)


# Sharded by its type, and with results that have no cotangent.
def test_explicit_mesh():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    w = normal(64, 64) / 8

    @save_quantized
    def layer(x):
        return jnp.argmax(x), jnp.tanh(x @ w)

    of = jax.jit(jax.grad(lambda x: jnp.sum(layer(x)[1] ** 2)))
    wanted = of(x)
    with jax.set_mesh(mesh):
        found = of(jax.device_put(x, NamedSharding(mesh, P("data"))))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.optimized
def test_memory():
    batch = normal(8192, 64)

    def wide(model, x, wrap):
        for layer in model.layers:
            x = wrap(lambda x, layer=layer: jax.nn.gelu(jax.vmap(layer)(x)))(x)
        return jnp.mean(x**2)

    def temporary(wrap):
        dynamic, static = eqx.partition(mlp, eqx.is_inexact_array)
        fn = lambda d, x: jax.grad(lambda d: wide(eqx.combine(d, static), x, wrap))(d)
        memory = jax.jit(fn).lower(dynamic, batch).compile().memory_analysis()
        return memory.temp_size_in_bytes

    assert temporary(save_quantized) < 0.8 * temporary(jax.checkpoint)


def test_errors():
    with pytest.raises(ValueError, match="`format` should round any number"):
        save_quantized(jnp.tanh, "rsrbinary")
    with pytest.raises(ValueError, match="format"):
        save_quantized(jnp.tanh, "no_format")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(save_quantized(jnp.tanh), (x,), (x,))
