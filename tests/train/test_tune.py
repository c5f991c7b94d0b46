"""Norms, biases and scales of rows, trained by divergence to the dense model."""

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import normal
from ..raises import raises


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    layers: list[eqx.nn.Linear]
    norm: eqx.nn.RMSNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 5)
        self.embedding = eqx.nn.Embedding(50, 64, key=keys[0])
        self.layers = [eqx.nn.Linear(64, 64, key=k) for k in keys[1:4]]
        self.norm = eqx.nn.RMSNorm(64)
        self.head = eqx.nn.Linear(64, 50, use_bias=False, key=keys[4])

    def __call__(self, token):
        x = self.embedding(token)
        for layer in self.layers:
            x = x + jax.nn.gelu(layer(self.norm(x)))
        return 4 * self.head(self.norm(x))


def fn(model, tokens):
    return jax.vmap(model)(tokens)


@eqx.filter_jit
def divergence(dense, model, tokens):
    p, q = (jax.nn.log_softmax(fn(m, tokens)) for m in (dense, model))
    return jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1))


formats = [
    eqq.Int(3, 32),
    eqq.Int(2, 32, "minimum"),
    eqq.Int(3, 32, "zero_point"),
    eqq.Rotated(eqq.Trellis(2, states=8)),
    eqq.Int4(),
    eqq.NF4(scale_dtype=jnp.bfloat16),
]


@pytest.mark.examples(1)
@pytest.mark.parametrize("format", formats, ids=str)
def test_tune(format):
    dense = Model(jr.key(0))
    model = eqq.tree_quantize(dense, format)
    tokens = jnp.arange(50)
    batches = [tokens[:25], tokens[25:]]
    tuned = eqq.train.tune(fn, dense, model, batches, steps=30, learning_rate=1e-2)
    before, after = (divergence(dense, m, tokens) for m in (model, tuned))
    assert after < 0.8 * before
    assert jtu.tree_structure(tuned) == jtu.tree_structure(model)
    np.testing.assert_array_equal(tuned.embedding.weight, model.embedding.weight)
    assert np.any(tuned.norm.weight != model.norm.weight)
    assert np.any(tuned.layers[0].bias != model.layers[0].bias)
    for old, new in zip((*model.layers, model.head), (*tuned.layers, tuned.head)):
        old, new = old.weight, new.weight
        np.testing.assert_array_equal(new.stored["codes"], old.stored["codes"])
        assert np.any(new.stored["scale"] != old.stored["scale"])
        # Each row is what it was, times a number.
        a, b = (np.asarray(w.dequantize(), np.float64) for w in (old, new))
        factor = np.sum(a * b, -1, keepdims=True) / np.sum(a * a, -1, keepdims=True)
        np.testing.assert_allclose(b, a * factor, atol=0.02 * np.max(np.abs(a)))
        assert np.all((factor > 0.5) & (factor < 2))


# Layers in a scan, of which each has rows of its own; and dictionaries.
def test_stacks():
    w = {
        "in": normal(16, 64) / 4,
        "layers": normal(3, 64, 64, seed=1) / 8,
        "out": normal(64, 20, seed=2) / 4,
        "bias": jnp.full(20, 0.1),
    }

    def call(w, x):
        step = lambda x, layer: (x + jnp.tanh(x @ layer), None)
        x, _ = jax.lax.scan(step, x @ w["in"], w["layers"])
        return x @ w["out"] + w["bias"][None]

    x = normal(64, 16, seed=3)
    model = eqq.tree_quantize(w, "int(3, 32)", axis=-2)
    tuned = eqq.train.tune(call, w, model, [x], steps=20, learning_rate=1e-2)
    log = jax.jit(lambda model: jax.nn.log_softmax(call(model, x)))
    logs = [np.asarray(log(m)) for m in (w, model, tuned)]
    losses = [np.mean(np.sum(np.exp(logs[0]) * (logs[0] - q), -1)) for q in logs]
    assert losses[2] < 0.9 * losses[1]
    stored = tuned["layers"].stored
    assert stored["scale"].shape == model["layers"].stored["scale"].shape


# Scales of few bits, or of all rows, stay; there are norms and biases still.
@pytest.mark.examples(1)
@pytest.mark.parametrize("format", ["mxfp4", eqq.Ternary(scale="tensor")], ids=str)
def test_scales_that_stay(format):
    dense = Model(jr.key(0))
    model = eqq.tree_quantize(dense, format)
    tuned = eqq.train.tune(fn, dense, model, [jnp.arange(50)], steps=4)
    old, new = (m.layers[0].weight.stored for m in (model, tuned))
    for a, b in zip(jtu.tree_leaves(old), jtu.tree_leaves(new), strict=True):
        np.testing.assert_array_equal(a, b)
    assert np.any(tuned.norm.weight != model.norm.weight)


def test_errors():
    w, x = {"a": normal(64, 64)}, normal(4, 64)
    call = lambda w, x: x @ w["a"]
    with raises(ValueError, "batches", "none"):
        eqq.train.tune(call, w, w, [])
    with raises(ValueError, "batches", "one array"):
        eqq.train.tune(call, w, w, x)
    with raises(ValueError, "steps", "0"):
        eqq.train.tune(call, w, w, [x], steps=0)
    with raises(ValueError, "quantized", "has none"):
        eqq.train.tune(call, w, w, [x])
    q = eqq.tree_quantize(w, "int4")
    with pytest.raises(ValueError, match="should be finite. Got nan"):
        eqq.train.tune(lambda w, x: jnp.nan * call(w, x), w, q, [x])
