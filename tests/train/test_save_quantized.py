import functools as ft

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
    of = lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x))))
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
    of = lambda both: jnp.sum(both[0](both[1]) ** 2)
    found, _ = eqx.filter_grad(of)((layer, x))
    kept = eqq.quantize(x, eqq.Int8(32), axis=-1).dequantize()
    _, pullback = jax.vjp(lambda w: jnp.tanh(kept @ w), layer.w)
    (wanted,) = pullback(2 * jnp.tanh(x @ layer.w))
    np.testing.assert_allclose(found.w, wanted, rtol=1e-4, atol=1e-4)
    # What is not differentiated is kept as it is.
    found = eqx.filter_grad(lambda layer: of((layer, x)))(layer)
    _, pullback = jax.vjp(lambda w: jnp.tanh(x @ w), layer.w)
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


@pytest.mark.usefixtures("unchecked")
def test_errors():
    with pytest.raises(ValueError, match="`format` should round any number"):
        save_quantized(jnp.tanh, "rsrbinary")
    with pytest.raises(ValueError, match="format"):
        save_quantized(jnp.tanh, "no_format")
    with pytest.raises(TypeError, match="`fn` should be a function. Got str"):
        save_quantized("int8")
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(save_quantized(jnp.tanh), (x,), (x,))


masks = [-np.inf, -1e30, -1e9, -1e4, float(np.finfo(np.float32).min)]


def gradients(wrap, masked, slopes_trained, jit):
    """Of attention with biases that grow with the distance, beside a mask."""
    q, slopes = normal(4, 32, 16), jnp.asarray([0.5, 0.25, 0.1, 0.01])
    distance = jnp.asarray(np.abs(np.subtract.outer(*[np.arange(32)] * 2)), jnp.float32)
    attend = wrap(lambda q, bias: jax.nn.softmax(q @ q.mT / 4 + bias) @ q)

    def bias(slopes, n):
        mask = jnp.where(jnp.arange(32) < n, 0.0, masked)
        return mask[None, None] - slopes[:, None, None] * distance[None]

    def of(trained, fixed, n):
        bias_n = bias({**trained, **fixed}["slopes"], n)
        return jnp.sum(attend(trained["q"], bias_n) ** 2)

    trained, fixed = {"q": q}, {"slopes": slopes}
    if slopes_trained:
        trained, fixed = trained | fixed, {}
    grad = jax.grad(of)
    # (Not traced, the mask is concrete.)
    return jax.jit(grad)(trained, fixed, 20) if jit else grad(trained, fixed, 20)


# Masks and biases that are not trained are kept as they are; with those that are, the
# biases next to a masked number do not lose their bits.
@pytest.mark.examples(2)
@pytest.mark.parametrize("slopes_trained", (False, True))
@pytest.mark.parametrize("masked", masks)
def test_masks(masked, slopes_trained):
    for jit in (True, False) if masked == -np.inf else (True,):
        wanted = gradients(jax.checkpoint, masked, slopes_trained, jit)
        found = gradients(save_quantized, masked, slopes_trained, jit)
        assert distance(found, wanted) < 0.02
        for name in wanted:
            assert distance([found[name]], [wanted[name]]) < 0.03


# Scores that are masked before.
@pytest.mark.examples(1)
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16, jnp.float16))
@pytest.mark.parametrize("masked", masks)
def test_masked_scores(masked, dtype):
    scores, values = normal(64, 32), normal(32, 16)
    out = normal(64, 16)
    masked = max(masked, float(jnp.finfo(dtype).min)) if np.isfinite(masked) else masked

    @ft.partial(jax.jit, static_argnums=0)
    def grad(wrap, scores):
        fn = wrap(lambda s: jax.nn.softmax(s.astype(jnp.float32)) @ values)
        masks = np.arange(32) < np.arange(64)[:, None] % 30 + 3
        # A row of zeros and masked numbers, and one that is masked as a whole.
        scores = scores.at[5].set(0)
        masks[6] = np.isinf(masked)
        masked_scores = jnp.where(masks, scores, jnp.asarray(masked, dtype))
        return jnp.sum(fn(masked_scores) * out)

    of = lambda wrap: jax.grad(lambda s: grad(wrap, s))(scores.astype(dtype))
    found, wanted = of(save_quantized), of(jax.checkpoint)
    assert found.dtype == dtype
    wide = lambda x: [np.asarray(x, np.float64)]
    assert distance(wide(found), wide(wanted)) < 0.03


# What is not a number stays so.
def test_arguments_that_are_nan():
    x = normal(32, 64).at[3, 4].set(jnp.nan)
    for grad in (jax.grad, lambda fn: jax.jit(jax.grad(fn))):
        found = grad(lambda x: jnp.sum(save_quantized(jnp.sin)(x)))(x)
        assert np.isnan(found[3, 4]) and np.isfinite(found[4:]).all()
