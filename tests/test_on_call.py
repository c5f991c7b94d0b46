import copy
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jaxtyping import Array

import eqquant as eqq

from .helpers import each_row, formats, normal


some_formats = pytest.mark.parametrize("name", ("int8", "nested"))


def quantized(model, name="int8", spec=True, **kwargs):
    # (Of an unknown class, the axis is a guess.)
    kwargs |= {} if spec is True else {"axis": -1}
    return eqq.tree_quantize(
        model, spec, formats[name], unsupported="on_call", min_size=0, **kwargs
    )


def close(y, z):
    np.testing.assert_allclose(y, z, rtol=1e-3, atol=1e-3)


class Attention(eqx.Module):
    """Of a class that is not known, and which has its own way with its weight."""

    weight: Array
    bias: Array
    embedding: eqx.nn.Embedding

    def __init__(self, key):
        self.weight = jr.normal(key, (3, 4, 8, 32)) / 6
        self.bias = jnp.zeros((3, 4))
        self.embedding = eqx.nn.Embedding(5, 32, key=key)

    def __call__(self, x):
        x = x + jax.vmap(self.embedding)(jnp.arange(5))
        q, k, v = jnp.einsum("ahdi,ti->atdh", self.weight, x)
        return jax.nn.dot_product_attention(q, k, v)


layers = {
    "conv1d": (lambda key: eqx.nn.Conv1d(4, 6, 3, key=key), (4, 11)),
    "conv2d": (
        lambda key: eqx.nn.Conv2d(4, 6, 3, groups=2, stride=2, key=key),
        (4, 11, 9),
    ),
    "conv3d": (lambda key: eqx.nn.Conv3d(2, 3, 2, key=key), (2, 5, 4, 3)),
    "transposed": (
        lambda key: eqx.nn.ConvTranspose2d(4, 6, 3, stride=2, key=key),
        (4, 5, 6),
    ),
    "weight-norm": (lambda key: eqx.nn.WeightNorm(eqx.nn.Linear(32, 16, key=key)), 32),
    "weight-norm-of-conv": (
        lambda key: eqx.nn.WeightNorm(eqx.nn.Conv1d(4, 6, 3, key=key)),
        (4, 11),
    ),
    "unknown": (Attention, (5, 32)),
}
all_layers = pytest.mark.parametrize("layer", layers)


@pytest.mark.examples(1)
@all_layers
@some_formats
def test_layers(layer, name):
    make, shape = layers[layer]
    dense = make(jr.key(0))
    # (Of an unknown class, it is not known which array is a weight.)
    spec = eqq.Rules([("weight", True)]) if layer == "unknown" else True
    model = quantized(dense, name, spec)
    assert isinstance(model, type(dense))
    assert type(model).__name__ == type(dense).__name__
    is_leaf = eqq.is_quantized
    assert any(map(is_leaf, jtu.tree_leaves(model, is_leaf=is_leaf)))
    # The same model with ordinary arrays is of the class it was.
    expected = eqq.tree_dequantize(model)
    assert jtu.tree_structure(expected) == jtu.tree_structure(dense)
    x = normal(3, *np.atleast_1d(shape))
    y = np.asarray(eqx.filter_jit(lambda model: jax.vmap(model)(x))(expected))
    close(model(x[0]), y[0])
    scanned = lambda model, x: jax.lax.scan(lambda c, x: (c, model(x)), None, x)[1]
    ways = eqx.filter_jit(lambda m, x: (m(x[0]), jax.vmap(m)(x), scanned(m, x)))
    for found, wanted in zip(ways(model, x), (y[0], y, y), strict=True):
        close(found, wanted)
    gradient = eqx.filter_jit(jax.grad(lambda x, model: jnp.sum(jnp.sin(model(x)))))
    close(gradient(x[0], model), gradient(x[0], expected))


def test_what_trains():
    model = quantized(layers["conv2d"][0](jr.key(0)))
    x = normal(4, 11, 9)
    grads = eqx.filter_grad(lambda model: jnp.sum(model(x) ** 2))(model)
    expected = eqx.filter_grad(lambda model: jnp.sum(model(x) ** 2))(
        eqq.tree_dequantize(model)
    )
    close(grads.bias, expected.bias)
    assert not any(map(eqx.is_inexact_array, jtu.tree_leaves(grads.weight)))


def test_state():
    make = eqx.nn.make_with_state(eqx.nn.SpectralNorm)
    layer = eqx.nn.Linear(16, 8, key=jr.key(0))
    dense, state = make(layer, "weight", key=jr.key(1))
    model = quantized(dense)
    assert eqq.is_quantized(model.layer.weight)
    x = normal(16)
    y, new = model(x, state)
    z, expected = eqq.tree_dequantize(model)(x, state)
    close(y, z)
    for a, b in zip(jtu.tree_leaves(new), jtu.tree_leaves(expected), strict=True):
        close(a, b)


def test_network(tmp_path):
    key = jr.key(0)
    dense = eqx.nn.Sequential(
        [
            eqx.nn.Conv2d(1, 8, 3, key=key),
            eqx.nn.Lambda(jax.nn.relu),
            eqx.nn.Lambda(jnp.ravel),
            eqx.nn.WeightNorm(eqx.nn.Linear(8 * 6 * 6, 32, key=key)),
            eqx.nn.Linear(32, 10, key=key),
        ]
    )
    model = quantized(dense)
    again = quantized(model)
    assert jtu.tree_structure(again) == jtu.tree_structure(model)
    x = normal(5, 1, 8, 8)
    y = each_row(model, x)
    close(y, jax.vmap(eqq.tree_dequantize(model))(x))
    eqq.save(tmp_path / "model.safetensors", model)
    close(jax.vmap(eqq.load(tmp_path / "model.safetensors", like=model))(x), y)
    assert "Conv2d" in repr(model) and "QuantizedArray" in repr(model)


def test_pickle():
    model = quantized(layers["conv2d"][0](jr.key(0)))
    # (Without what JAX cannot pickle: functions.)
    arrays = eqx.filter(model, eqx.is_array)
    again = pickle.loads(pickle.dumps(arrays))
    assert jtu.tree_structure(again) == jtu.tree_structure(arrays)
    x = normal(4, 11, 9)
    close(copy.deepcopy(model)(x), model(x))


def test_others_are_left_dense():
    dense = layers["unknown"][0](jr.key(0))
    with pytest.warns(UserWarning, match="Nothing is quantized"):
        assert not eqq.is_quantized(eqq.tree_quantize(dense).weight)
    with pytest.warns(UserWarning, match="Nothing is quantized"):
        assert not eqq.is_quantized(quantized(dense).weight)
    # An embedding is one here, too.
    model = quantized(dense, spec=eqq.Rules([("weight", True)]))
    assert eqq.is_quantized(model.weight)
    assert not eqq.is_quantized(model.embedding.weight)
    x = normal(5, 32)
    close(model(x), eqq.tree_dequantize(model)(x))


def test_subclasses_with_a_call_of_their_own():
    class Plain(eqx.nn.Linear):
        pass

    class Other(eqx.nn.Linear):
        def __call__(self, x, *, key=None):
            return jnp.tensordot(self.weight, x, 1) + self.bias

    x = normal(64)
    for cls in (Plain, Other):
        dense = cls(64, 32, key=jr.key(0))
        model = quantized(dense)
        assert isinstance(model, cls)
        assert (type(model) is cls) == (cls is Plain)
        assert eqq.is_quantized(model.weight)
        close(model(x), eqq.tree_dequantize(model)(x))


def test_not_callable():
    class Weights(eqx.Module):
        weight: Array

    model = Weights(normal(32, 32))
    with pytest.warns(UserWarning, match="`weight`: Weights is not a known owner"):
        assert not eqq.is_quantized(quantized(model).weight)
