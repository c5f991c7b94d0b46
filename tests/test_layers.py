import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq

from .helpers import native_formats, normal


key = jr.key(0)


class TiedModel(eqx.Module):
    shared: eqx.nn.Shared

    def __init__(self):
        embedding = eqx.nn.Embedding(96, 64, key=key)
        linear = eqx.nn.Linear(64, 96, use_bias=False, key=key)
        self.shared = eqx.nn.Shared(
            (embedding, linear),
            where=lambda pair: pair[1].weight,
            get=lambda pair: pair[0].weight,
        )

    def __call__(self, token):
        embedding, linear = self.shared()
        return linear(embedding(token))


def _batch_norm():
    def make():
        linear = eqx.nn.Linear(64, 64, key=key)
        return eqx.nn.Sequential([linear, eqx.nn.BatchNorm(64, "batch", mode="ema")])

    return eqx.nn.make_with_state(make)()


def _call_batch_norm(model_and_state, x):
    model, state = model_and_state
    fn = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    y, state = fn(x, state)
    return y


def _ensemble():
    return eqx.filter_vmap(lambda key: eqx.nn.MLP(64, 48, 64, 2, key=key))(
        jr.split(key, 3)
    )


def _call_ensemble(models, x):
    return eqx.filter_vmap(lambda model: jax.vmap(model)(x))(models)


# How to make each layer, how to call it on rows of 64 numbers, and how many weights of
# it there are to quantize.
layers = {
    "Linear": (
        lambda: eqx.nn.Linear(64, 48, key=key),
        lambda layer, x: jax.vmap(layer)(x),
        1,
    ),
    "Linear of a scalar": (
        lambda: eqx.nn.Linear(2048, "scalar", key=key),
        lambda layer, x: layer(jnp.tile(x[0], 32)),
        1,
    ),
    "MLP": (
        lambda: eqx.nn.MLP(64, 48, 64, 2, key=key),
        lambda layer, x: jax.vmap(layer)(x),
        3,
    ),
    "MultiheadAttention": (
        lambda: eqx.nn.MultiheadAttention(4, 64, key=key),
        lambda layer, x: layer(x, x, x),
        4,
    ),
    "GRUCell": (
        lambda: eqx.nn.GRUCell(64, 64, key=key),
        lambda layer, x: jax.vmap(layer)(x, x),
        2,
    ),
    "LSTMCell": (
        lambda: eqx.nn.LSTMCell(64, 64, key=key),
        lambda layer, x: jnp.stack(jax.vmap(layer)(x, (x, x))),
        2,
    ),
    "Embedding": (
        lambda: eqx.nn.Embedding(96, 64, key=key),
        lambda layer, x: jax.vmap(layer)(jnp.array([0, 3, 95, 3])),
        1,
    ),
    "Sequential": (
        lambda: eqx.nn.Sequential(
            [
                eqx.nn.Linear(64, 64, key=key),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Dropout(0.5, inference=True),
                eqx.nn.LayerNorm(64),
                eqx.nn.Linear(64, 48, key=key),
            ]
        ),
        lambda layer, x: jax.vmap(layer)(x),
        2,
    ),
    "Shared": (TiedModel, lambda layer, x: jax.vmap(layer)(jnp.arange(7)), 1),
    "BatchNorm": (_batch_norm, _call_batch_norm, 1),
    "ensemble": (_ensemble, _call_ensemble, 3),
}

all_layers = pytest.mark.parametrize(
    "make,call,number",
    [pytest.param(*layer, id=name) for name, layer in layers.items()],
)


def _quantized(tree):
    leaves = jax.tree.leaves(tree, is_leaf=eqq.is_quantized)
    return [leaf for leaf in leaves if eqq.is_quantized(leaf)]


@pytest.mark.examples(1)
@all_layers
def test_layers_are_untouched(make, call, number):
    layer = make()
    x = normal(7, 64)
    compiled = eqx.filter_jit(call)
    for format, ways in ((eqq.NF4(), (call, compiled)), (eqq.Int8(), (compiled,))):
        quantized = eqq.tree_quantize(layer, format, embeddings=True)
        assert type(quantized) is type(layer)
        assert len(_quantized(quantized)) == number
        expected = compiled(eqq.tree_dequantize(quantized), x)
        for run in ways:
            y = run(quantized, x)
            assert y.shape == expected.shape and y.dtype == expected.dtype
            assert jnp.allclose(y, expected, rtol=1e-4, atol=1e-4)
        # It is the weights that were quantized, not something else.
        assert not np.array_equal(expected, compiled(layer, x))


@pytest.mark.examples(1)
@all_layers
def test_layers_in_bfloat16(make, call, number):
    def cast(leaf):
        return leaf.astype(jnp.bfloat16) if eqx.is_inexact_array(leaf) else leaf

    # A model quantized from float32, and everything else cast after that.
    layer = jax.tree.map(cast, eqq.tree_quantize(make(), embeddings=True))
    assert all(q.dtype == jnp.float32 for q in _quantized(layer))
    if type(layer) in (eqx.nn.Embedding, TiedModel):
        # Rows of an embedding have its own dtype.
        layer = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if eqq.is_quantized(x) else x,
            layer,
            is_leaf=eqq.is_quantized,
        )
    y = call(layer, normal(7, 64, dtype=jnp.bfloat16))
    assert y.dtype == jnp.bfloat16
    dense = eqq.tree_dequantize(layer)
    dense = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32) if eqx.is_inexact_array(leaf) else leaf,
        dense,
    )
    x = normal(7, 64, dtype=jnp.bfloat16).astype(jnp.float32)
    expected = call(dense, x)
    scale = jnp.max(jnp.abs(expected))
    assert jnp.max(jnp.abs(y.astype(jnp.float32) - expected)) < 0.05 * scale


# Tied weights stay tied: there is one quantized array, that both layers use.
def test_shared_stays_shared():
    model = eqq.tree_quantize(TiedModel(), embeddings=True)
    embedding, linear = model.shared()
    assert embedding.weight.stored["codes"] is linear.weight.stored["codes"]
    # Left alone by default, as any embedding is.
    assert len(_quantized(eqq.tree_quantize(TiedModel()))) == 0


# Without `Shared` too: to quantize the one and keep the other would take more memory.
def test_tied_without_shared():
    embedding = eqx.nn.Embedding(96, 64, key=key)
    linear = eqx.nn.Linear(64, 96, use_bias=False, key=key)
    linear = eqx.tree_at(lambda linear: linear.weight, linear, embedding.weight)
    assert len(_quantized(eqq.tree_quantize((embedding, linear)))) == 0
    both = eqq.tree_quantize((embedding, linear), embeddings=True)
    assert both[0].weight is both[1].weight
    named = eqq.tree_quantize((embedding, linear), eqq.Rules([("1.weight", "nf4")]))
    assert len(_quantized(named)) == 1


def test_the_same_array_twice_stays_the_same():
    w = normal(64, 64)
    tree = eqq.tree_quantize({"a": w, "b": [w, normal(64, 64, seed=1)]})
    assert tree["a"] is tree["b"][0]
    assert tree["a"] is not tree["b"][1]


@pytest.mark.examples(1)
@native_formats
def test_training_step_of_the_norms(format):
    class Block(eqx.Module):
        norm: eqx.nn.LayerNorm
        mlp: eqx.nn.MLP

        def __call__(self, x):
            return x + self.mlp(self.norm(x))

    block = Block(eqx.nn.LayerNorm(64), eqx.nn.MLP(64, 64, 64, 1, key=key))
    block = eqq.tree_quantize(block, format)
    x, y = normal(7, 64), normal(7, 64, seed=1)

    @eqx.filter_jit
    @eqx.filter_grad
    def gradient(block):
        return jnp.mean((jax.vmap(block)(x) - y) ** 2)

    got = gradient(block)
    expected = gradient(eqq.tree_dequantize(block))
    assert jnp.allclose(got.norm.weight, expected.norm.weight, rtol=1e-3, atol=1e-5)
    # And nothing is computed for what is frozen.
    assert jax.tree.leaves(got.mlp.layers[0].weight) == []


@pytest.mark.filterwarnings(
    "ignore:Nothing is quantized", "ignore:Only .* are quantized"
)
@pytest.mark.parametrize("groups", (1, 2))
def test_convolutions_are_left_dense(groups):
    conv = eqx.nn.Conv2d(32, 64, 3, groups=groups, key=key)
    assert len(_quantized(eqq.tree_quantize(conv))) == 0
    assert len(_quantized(eqq.tree_quantize(conv, eqq.Rules([("*", "nf4")])))) == 0
    with pytest.raises(ValueError, match="`weight` cannot be quantized.*convolution"):
        eqq.tree_quantize(conv, unsupported="error")
    assert conv(normal(32, 8, 8)).shape == (64, 6, 6)


@pytest.mark.examples(1)
@pytest.mark.parametrize("norm", (eqx.nn.WeightNorm, "spectral"))
def test_reparametrised_layers_are_left_dense(norm):
    linear = eqx.nn.Linear(64, 64, key=key)
    if norm == "spectral":
        make = lambda: eqx.nn.SpectralNorm(linear, "weight", key=key)
        layer, state = eqx.nn.make_with_state(make)()
    else:
        layer = norm(linear)
    with pytest.warns(UserWarning, match="`layer.weight`: reparametrised by a"):
        quantized = eqq.tree_quantize(layer, eqq.Rules([("*", "nf4")]))
    assert len(_quantized(quantized)) == 0
