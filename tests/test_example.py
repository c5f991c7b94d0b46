import pickle
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jaxtyping import Array

import eqquant as eqq

from . import helpers


def normal(seed, *shape):
    return helpers.normal(*shape, seed=seed) / 4


# Models whose layers are not known, each of which uses its weights in its own way.


class Rows(eqx.Module):
    """A container: others read its field."""

    weight: Array


class Attention(eqx.Module):
    query: Rows
    key_value: Array
    out: Rows

    def __call__(self, x):
        q = jnp.einsum("td,hde->hte", x, self.query.weight)
        k, v = jnp.einsum("td,khde->khte", x, self.key_value)
        y = jax.nn.softmax(q @ k.mT) @ v
        return jnp.einsum("hte,hed->td", y, self.out.weight)


class Llama(eqx.Module):
    embedding: eqx.nn.Embedding
    position: Array
    layers: list[Attention]
    head: Rows

    def __call__(self, ids):
        x = jax.vmap(self.embedding)(ids) + self.position
        for layer in self.layers:
            x = x + layer(x)
        return x @ self.head.weight


def llama():
    layers = [
        Attention(
            Rows(normal(i, 2, 32, 16)),
            normal(10 + i, 2, 2, 32, 16),
            Rows(normal(20 + i, 2, 16, 32)),
        )
        for i in range(2)
    ]
    embedding = eqx.nn.Embedding(7, 32, key=jr.key(0))
    model = Llama(embedding, normal(5, 5, 32), layers, Rows(normal(6, 32, 48)))
    return model, jnp.arange(5)


class Experts(eqx.Module):
    router: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __call__(self, x):
        expert = jnp.argmax(jax.vmap(self.router)(x), -1)
        order = jnp.argsort(expert)
        sizes = jnp.bincount(expert, length=4).astype(jnp.int32)
        up, down = (w.weight.transpose(0, 2, 1) for w in (self.up, self.down))
        hidden = jax.nn.silu(lax.ragged_dot(x[order], up, sizes))
        return lax.ragged_dot(hidden, down, sizes)[jnp.argsort(order)]


def experts():
    stack = lambda i, o, key: jax.vmap(
        lambda k: eqx.nn.Linear(i, o, use_bias=False, key=k)
    )(jr.split(jr.key(key), 4))
    router = eqx.nn.Linear(32, 4, key=jr.key(0))
    return Experts(router, stack(32, 48, 1), stack(48, 32, 2)), normal(3, 9, 32)


class NonNegative(eqx.Module):
    raw: Array

    def value(self):
        return jax.nn.softplus(self.raw)


class Masked(eqx.Module):
    raw: Array
    mask: Array

    def value(self):
        return jnp.where(self.mask, self.raw, 0)


class Constrained(eqx.Module):
    first: Masked
    second: NonNegative
    bias: Array

    def __call__(self, x):
        x = jnp.tanh(self.first.value() @ x + self.bias[0])
        return self.second.value() @ x


def constrained():
    mask = jnp.tril(jnp.ones((48, 32), bool))
    # (A bias may be a row of a matrix.)
    bias = normal(4, 2, 48)
    model = Constrained(
        Masked(normal(0, 48, 32), mask), NonNegative(normal(1, 40, 48)), bias
    )
    return model, normal(2, 32)


class Unwrapped(eqx.Module):
    """Its parameters are unwrapped before, from outside."""

    first: NonNegative
    second: Array

    def __call__(self, x):
        return self.second @ jnp.tanh(self.first @ x)  # pyright: ignore

    def log_prob(self, x):
        is_wrapper = lambda node: isinstance(node, NonNegative)
        unwrap = lambda node: node.value() if is_wrapper(node) else node
        return jax.tree.map(unwrap, self, is_leaf=is_wrapper)(x)


class ConvNet(eqx.Module):
    patches: eqx.nn.Conv2d
    depthwise: eqx.nn.Conv2d
    norm: eqx.nn.LayerNorm
    head: eqx.nn.WeightNorm

    def __call__(self, x):
        x = self.depthwise(self.patches(x))
        return self.head(jax.nn.gelu(self.norm(jnp.mean(x, (1, 2)))))


def conv_net():
    a, b, c = jr.split(jr.key(0), 3)
    return ConvNet(
        eqx.nn.Conv2d(3, 32, 4, stride=4, key=a),
        eqx.nn.Conv2d(32, 32, 3, padding=1, groups=32, key=b),
        eqx.nn.LayerNorm(32),
        eqx.nn.WeightNorm(eqx.nn.Linear(32, 48, key=c)),
    ), normal(1, 3, 16, 16)


class Spectral(eqx.Module):
    real: Array
    imaginary: Array

    def __call__(self, x):
        modes = jnp.fft.rfft(x)[:, :8]
        y = jnp.einsum("im,iom->om", modes, lax.complex(self.real, self.imaginary))
        return jnp.fft.irfft(y, x.shape[-1])


def spectral():
    return Spectral(normal(0, 12, 16, 8), normal(1, 12, 16, 8)), normal(2, 12, 32)


class Stack(eqx.Module):
    layers: eqx.nn.MLP

    def __call__(self, x):
        arrays, static = eqx.partition(self.layers, eqx.is_array)
        step = lambda x, a: (x + eqx.combine(a, static)(x), None)
        return lax.scan(step, x, arrays)[0]


def stack():
    make = lambda key: eqx.nn.MLP(32, 32, 48, depth=1, key=key)
    return Stack(eqx.filter_vmap(make)(jr.split(jr.key(0), 3))), normal(1, 32)


class Recurrent(eqx.Module):
    cell: eqx.nn.LSTMCell

    def __call__(self, xs):
        start = jnp.zeros(24), jnp.zeros(24)
        return lax.scan(lambda s, x: (self.cell(x, s), None), start, xs)[0][0]


def recurrent():
    return Recurrent(eqx.nn.LSTMCell(32, 24, key=jr.key(0))), normal(1, 5, 32)


models = (llama, experts, constrained, conv_net, spectral, stack, recurrent)
is_leaf = eqq.is_quantized


def matrices(model, quantized):
    """How many numbers of matrices are quantized, and how many there are."""
    pairs = zip(
        jtu.tree_leaves(model), jtu.tree_leaves(quantized, is_leaf=is_leaf), strict=True
    )
    some = [(w.size, is_leaf(q)) for w, q in pairs if eqx.is_array(w) and w.ndim > 1]
    return sum(n for n, taken in some if taken), sum(n for n, _ in some)


@pytest.mark.examples(1)
@pytest.mark.parametrize("make", models)
def test_models(make):
    model, x = make()
    q = eqq.tree_quantize(model, "int8", min_size=0, example=x)
    taken, size = matrices(model, q)
    # Embeddings and positions; masks and biases; what of biases and sizes is no vector.
    spared: Any = {
        llama: 12 * 32,
        constrained: 34 * 48,
        conv_net: 2 * 32 + 48,
        stack: 3 * (32 + 48),
    }
    assert taken == size - spared.get(make, 0)
    assert type(q).__name__ == type(model).__name__
    dense = eqq.tree_dequantize(q)
    call = eqx.filter_jit(lambda model, x: model(x))
    wanted = np.asarray(call(dense, x))
    for found in (q(x), call(q, x)):
        error = np.max(np.abs(np.asarray(found) - wanted)) / np.max(np.abs(wanted))
        assert error < 5e-3
    if make is not llama:
        loss = lambda x, model: jnp.sum(model(x) ** 2)
        gradient = eqx.filter_jit(jax.grad(loss))
        np.testing.assert_allclose(
            gradient(x, q), gradient(x, dense), rtol=1e-2, atol=1e-3
        )


@pytest.mark.thorough
@pytest.mark.parametrize("make", models)
def test_calibrated_models(make):
    model, x = make()
    # (Of one input the errors of few numbers are the error.)
    inputs = [np.roll(x, i) for i in range(8)]
    stats = eqq.calibrate(lambda model, x: model(x), model, inputs)
    options = {"method": eqq.ScaleSearch(), "min_size": 0, "example": x}
    q = eqq.tree_quantize(model, "int8", stats=stats, **options)
    found, _ = jtu.tree_flatten_with_path(q, is_leaf=is_leaf)
    taken = {
        jtu.keystr(path, simple=True, separator=".")
        for path, leaf in found
        if is_leaf(leaf)
    }
    assert taken and taken <= {*stats}
    nearest = eqq.tree_quantize(model, "int8", min_size=0, example=x)
    call = eqx.filter_jit(lambda model, x: model(x))
    outputs = lambda model: np.stack([call(model, x) for x in inputs])
    wanted = outputs(model)
    lost = lambda q: np.linalg.norm(outputs(q) - wanted)
    assert lost(q) < 1.2 * lost(nearest)


def test_axes():
    model, x = llama()
    q = eqq.tree_quantize(model, "int8", min_size=0, example=x)
    layer = q.layers[0]
    assert layer.query.weight.axis == -2
    assert layer.key_value.axis == -2
    assert layer.out.weight.axis == (-3, -2)
    assert q.head.weight.axis == -2


def test_only_what_has_to_runs_as_by_implicit():
    model, x = experts()
    q = eqq.tree_quantize(model, "int8", min_size=0, example=x)
    assert type(q) is not Experts
    assert type(q.router) is eqx.nn.Linear
    mlp = eqx.nn.MLP(32, 8, 48, depth=1, key=jr.key(0))
    q = eqq.tree_quantize(mlp, "int8", min_size=0, example=x[0])
    assert type(q) is eqx.nn.MLP


def test_methods():
    model = Unwrapped(NonNegative(normal(0, 48, 32)), normal(1, 40, 48))
    x = normal(2, 32)
    fn = lambda model, x: model.log_prob(x)
    q = eqq.tree_quantize(model, "int8", min_size=0, example=(fn, (x,)))
    assert is_leaf(q.first.raw) and is_leaf(q.second)
    assert type(q) is Unwrapped and type(q.first) is not NonNegative
    wanted = fn(eqq.tree_dequantize(q), x)
    np.testing.assert_allclose(fn(q, x), wanted, rtol=1e-3, atol=1e-3)
    again = pickle.loads(pickle.dumps(q))
    np.testing.assert_array_equal(fn(again, x), fn(q, x))


def test_functions_and_skeletons():
    w = {"in": normal(0, 32, 48), "position": normal(1, 9, 32)}
    fn = lambda w, x: jnp.tanh((x + w["position"]) @ w["in"])
    x = jax.ShapeDtypeStruct((9, 32), jnp.float32)
    q = eqq.tree_quantize(w, "int8", min_size=0, example=(fn, (x,)))
    assert is_leaf(q["in"]) and not is_leaf(q["position"])
    model = eqx.filter_eval_shape(lambda: llama()[0])
    ids = jax.ShapeDtypeStruct((5,), jnp.int32)
    q = eqq.tree_quantize(model, "int8", min_size=0, example=ids)
    assert is_leaf(q.layers[1].key_value)


# Weights that meet weights.
def test_learned_queries_and_pairs():
    shapes = {
        "queries": (12, 16),
        "latents": (12, 24),
        "project": (24, 16),
        "key": (32, 16),
        "down": (32, 4),
        "up": (4, 16),
        "left": (32, 8),
        "right": (8, 16),
    }
    w = {name: normal(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    def fn(w, x):
        keys = x @ w["key"] + (x @ w["down"]) @ w["up"] + x @ (w["left"] @ w["right"])
        return w["latents"] @ w["project"] @ keys.T, w["queries"] @ keys.T

    x = normal(9, 5, 32)
    with pytest.warns(UserWarning, match="but only with other arrays of the model"):
        q = eqq.tree_quantize(w, "int8", min_size=0, example=(fn, (x,)))
    taken = {name for name, leaf in q.items() if is_leaf(leaf)}
    assert taken == {"queries", "key", "down", "up"}
    assert q["queries"].axis == -1
    every = eqq.tree_quantize(w, eqq.Rules([("*", "int8")]), example=(fn, (x,)))
    assert all(map(is_leaf, every.values()))
    call = jax.jit(fn)
    for model in (q, every):
        expected = call(eqq.tree_dequantize(model), x)
        for a, b in zip(call(model, x), expected):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)
    stats = eqq.calibrate(fn, w, [x])
    assert {*stats} == {*shapes} and stats.incomplete == ()
    keys = np.asarray(x, np.float64) @ np.asarray(w["key"], np.float64)
    keys += np.asarray(x) @ (np.asarray(w["down"]) @ np.asarray(w["up"]))
    keys += np.asarray(x) @ (np.asarray(w["left"]) @ np.asarray(w["right"]))
    np.testing.assert_allclose(stats["queries"].value[0], keys.T @ keys, rtol=1e-4)
    np.testing.assert_allclose(
        stats["right"].value[0], np.asarray(w["left"]).T @ w["left"], rtol=1e-4
    )


# Arrays that a function closes over are inputs, too.
def test_inputs_that_are_closed_over():
    x = normal(2, 5, 32)
    q = eqq.tree_quantize(
        {"w": normal(0, 32, 48)}, "int8", min_size=0, example=(lambda w: x @ w["w"], ())
    )
    assert is_leaf(q["w"])


def test_files(tmp_path):
    model, x = experts()
    q = eqq.tree_quantize(model, "int8", min_size=0, example=x)
    eqq.save(tmp_path / "experts.safetensors", q)
    skeleton = eqx.filter_eval_shape(lambda: model)
    like = eqq.tree_quantize(skeleton, "int8", min_size=0, example=x)
    loaded = eqq.load(tmp_path / "experts.safetensors", like=like)
    np.testing.assert_array_equal(loaded(x), q(x))


def test_what_cannot_run():
    w = {"w": normal(0, 32, 48)}
    fn = lambda w, x: lax.dot_general(x, w["w"], (((1,), (0,)), ((), ())))
    x = normal(1, 9, 32)
    text = "`w` cannot be quantized.*<lambda>` passes it to functions.*eqquant.implicit"
    with pytest.raises(ValueError, match=text):
        eqq.tree_quantize(w, "int8", min_size=0, example=(fn, (x,)))
    run = eqq.implicit(fn)
    q = eqq.tree_quantize(w, "int8", min_size=0, example=(run, (x,)))
    np.testing.assert_allclose(run(q, x), fn(eqq.tree_dequantize(q), x), atol=1e-4)
