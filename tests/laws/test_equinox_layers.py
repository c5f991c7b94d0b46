"""Every layer of `eqx.nn`, with any value of `unsupported`, runs as its dequantized
self does. Only the weights of products are quantized."""

import inspect

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import normal


nn, key = eqx.nn, jr.key(0)


def stateful(make):
    # A layer with its state as one tree, so that arrays of states are seen, too.
    return lambda: nn.make_with_state(make)()


def with_state(model_and_state, *args):
    model, state = model_and_state
    return model(*args, state)[0]


def batched(model_and_state, x):
    model, state = model_and_state
    fn = jax.vmap(model, in_axes=(0, None), out_axes=(0, None), axis_name="batch")
    return fn(x, state)[0]


def call(model, *args):
    return model(*args)


def shared():
    pair = nn.Embedding(8, 16, key=key), nn.Linear(16, 8, use_bias=False, key=key)
    where, get = lambda pair: pair[1].weight, lambda pair: pair[0].weight
    return nn.Shared(pair, where, get)


def call_shared(shared, token):
    embedding, linear = shared()
    return linear(embedding(token))


def convolution(rank, transposed):
    cls = nn.ConvTranspose if transposed else nn.Conv
    return lambda: cls(rank, 2, 4, 3, key=key), call, (normal(2, *[5] * rank),)


def learnt():
    return nn.MLP(8, 8, 16, 2, activation=nn.PReLU(), key=key)


def pool(cls, rank, *args):
    return lambda: cls(*args), call, (normal(2, *[6] * rank),)


x = normal(16)
# How to make each layer, how to call it, and what with.
layers = {
    "Linear": (lambda: nn.Linear(16, 8, key=key), call, (x,)),
    "Identity": (nn.Identity, call, (x,)),
    "MLP": (learnt, call, (x[:8],)),
    "stack of MLPs": (
        lambda: eqx.filter_vmap(lambda key: nn.MLP(8, 8, 16, 1, nn.PReLU(), key=key))(
            jr.split(key, 3)
        ),
        lambda models, x: eqx.filter_vmap(lambda model: model(x))(models),
        (x[:8],),
    ),
    "PReLU": (lambda: jax.vmap(lambda _: nn.PReLU())(x), jax.vmap(call), (x,)),
    "GRUCell": (lambda: nn.GRUCell(16, 8, key=key), call, (x, x[:8])),
    "LSTMCell": (
        lambda: nn.LSTMCell(16, 8, key=key),
        lambda cell, x, h: cell(x, (h, h))[0],
        (x, x[:8]),
    ),
    "MultiheadAttention": (
        lambda: nn.MultiheadAttention(2, 16, key=key),
        call,
        (normal(5, 16),) * 3,
    ),
    "Embedding": (lambda: nn.Embedding(8, 16, key=key), call, (jnp.asarray(3),)),
    "RotaryPositionalEmbedding": (
        lambda: nn.RotaryPositionalEmbedding(16),
        call,
        (normal(5, 16),),
    ),
    "Dropout": (lambda: nn.Dropout(inference=True), call, (x,)),
    "Lambda": (lambda: nn.Lambda(jnp.tanh), call, (x,)),
    "Sequential": (
        lambda: nn.Sequential([nn.Linear(16, 8, key=key), nn.Lambda(jnp.tanh)]),
        call,
        (x,),
    ),
    "Shared": (shared, call_shared, (jnp.asarray(3),)),
    "LayerNorm": (lambda: nn.LayerNorm((4, 16)), call, (normal(4, 16),)),
    "RMSNorm": (lambda: nn.RMSNorm((4, 16)), call, (normal(4, 16),)),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), call, (normal(4, 16),)),
    "BatchNorm": (
        stateful(lambda: nn.BatchNorm(16, "batch", mode="ema")),
        batched,
        (normal(4, 16),),
    ),
    "WeightNorm": (lambda: nn.WeightNorm(nn.Linear(16, 8, key=key)), call, (x,)),
    "WeightNorm of a convolution": (
        lambda: nn.WeightNorm(nn.Conv1d(2, 4, 3, key=key)),
        call,
        (normal(2, 5),),
    ),
    "SpectralNorm": (
        stateful(lambda: nn.SpectralNorm(nn.Linear(16, 8, key=key), "weight", key=key)),
        with_state,
        (x,),
    ),
    **{f"Conv{n}d": convolution(n, False) for n in (1, 2, 3)},
    **{f"ConvTranspose{n}d": convolution(n, True) for n in (1, 2, 3)},
    **{
        f"{kind}Pool{n}d": pool(getattr(nn, f"{kind}Pool{n}d"), n, 2)
        for kind in ("Avg", "Max", "AdaptiveAvg", "AdaptiveMax")
        for n in (1, 2, 3)
    },
}
# Of these, the ones above are made; and what is no layer.
general = {"Conv", "ConvTranspose", "Pool", "AdaptivePool"}
others = {"State", "StateIndex", "StatefulLayer"}
refused = ("Conv", "WeightNorm of a conv")


def test_there_is_every_layer():
    classes = {name for name, x in vars(nn).items() if inspect.isclass(x)}
    assert classes - general - others <= set(layers)


@pytest.mark.parametrize("unsupported", ("skip", "on_call", "error"))
@pytest.mark.parametrize("name", layers)
@pytest.mark.filterwarnings("ignore:Nothing is quantized:UserWarning")
def test_layers_run(name, unsupported):
    make, run, args = layers[name]
    dense = make()
    kwargs = {"min_size": 0, "embeddings": True, "unsupported": unsupported}
    if unsupported == "error" and name.startswith(refused):
        # (A `WeightNorm` of a convolution is left for being a `WeightNorm`.)
        if name.startswith("Conv"):
            with pytest.raises(ValueError, match="the filter of a convolution"):
                eqq.tree_quantize(dense, "int8", **kwargs)
        return
    model = eqq.tree_quantize(dense, "int8", **kwargs)
    found = eqx.filter_jit(run)(model, *args)
    expected = eqx.filter_jit(run)(eqq.tree_dequantize(model), *args)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    rows = eqq.report(model).rows
    quantized = {row.path.split(".")[-1] for row in rows if row.format is not None}
    assert quantized <= {"weight", "weight_ih", "weight_hh"}
    assert not any("activation" in row.path for row in rows if row.format is not None)


def test_slopes_of_an_activation_stay_dense():
    dense = nn.MLP(8, 8, 512, 2, activation=nn.PReLU(), key=key)
    assert dense.activation.negative_slope.shape == (2, 512)
    model = eqq.tree_quantize(dense, "int8", unsupported="on_call")
    assert not eqq.is_quantized(model.activation.negative_slope)
    assert all(eqq.is_quantized(layer.weight) for layer in model.layers)
    expected = eqq.tree_dequantize(model)(x[:8])
    np.testing.assert_allclose(model(x[:8]), expected, rtol=1e-4, atol=1e-4)


class Memory(eqx.Module):
    """Multiplies with its state, and replaces it."""

    linear: nn.Linear
    index: nn.StateIndex

    def __init__(self):
        self.linear = nn.Linear(16, 16, key=key)
        self.index = nn.StateIndex(jnp.eye(16))

    def __call__(self, x, state):
        w = state.get(self.index)
        return self.linear(w @ x), state.set(self.index, 0.9 * w)


@pytest.mark.parametrize("example", (None, (lambda pair, x: pair[0](x, pair[1]), (x,))))
def test_states_stay_dense(example):
    pair = nn.make_with_state(Memory)()
    model, state = eqq.tree_quantize(pair, "int8", min_size=0, example=example)
    assert eqq.is_quantized(model.linear.weight)
    _, new = model(x, state)
    assert jtu.tree_structure(new) == jtu.tree_structure(pair[1])
    # Before the state is apart, too.
    model = eqq.tree_quantize(Memory(), "int8", min_size=0, unsupported="on_call")
    assert not eqq.is_quantized(model.index.init)


class Positions(eqx.Module):
    """Adds what it has, and multiplies with nothing."""

    table: jax.Array

    def __call__(self, x):
        return x + self.table


def test_what_is_not_known_to_be_a_weight_stays_dense():
    dense = nn.Sequential([nn.Linear(16, 16, key=key), Positions(normal(4, 16))])
    make = lambda spec: eqq.tree_quantize(
        dense, spec, "int8", min_size=0, unsupported="on_call"
    )
    model = make(True)
    assert eqq.is_quantized(model[0].weight) and not eqq.is_quantized(model[1].table)
    named = make(eqq.Rules([("layers.1.table", True), ("*", None)]))
    assert eqq.is_quantized(named[1].table)
    y = dense[1].table + x[None]
    np.testing.assert_allclose(named[1](x[None]), y, atol=0.02)
