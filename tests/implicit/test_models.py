import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import pytest
from jax import lax

import eqquant as eqq
from eqquant import implicit

from ..helpers import normal
from .same import assert_close, traced_implicit, uses_in


def quantized(model, axis, format="int8"):
    """With every matrix and every filter of a model quantized, of whatever layer."""

    def replace(w):
        if not eqx.is_inexact_array(w) or w.ndim < 2 or w.size < 100:
            return w
        return eqq.quantize(w, format, axis=axis(w))

    return jax.tree.map(replace, model)


def all_but_first(w):
    return tuple(range(1 - w.ndim, 0))


class ConvNet(eqx.Module):
    first: eqx.nn.Conv2d
    second: eqx.nn.ConvTranspose2d
    norm: eqx.nn.GroupNorm
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jr.split(key, 3)
        self.first = eqx.nn.Conv2d(4, 12, 3, padding=1, key=keys[0])
        self.second = eqx.nn.ConvTranspose2d(12, 8, 3, stride=2, key=keys[1])
        self.norm = eqx.nn.GroupNorm(2, 8)
        self.head = eqx.nn.Linear(8, 10, key=keys[2])

    def __call__(self, x):
        x = jax.nn.gelu(self.first(x))
        x = jax.nn.relu(self.norm(self.second(x)))
        return self.head(jnp.mean(x, axis=(1, 2)))


class Attention(eqx.Module):
    projections: jax.Array  # three, inputs, heads, features of a head
    output: jax.Array  # heads, features of a head, outputs

    def __call__(self, x):
        q, k, v = jnp.einsum("td,sdhe->sthe", x, self.projections)
        y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        return jnp.einsum("the,hed->td", y, self.output)


class Experts(eqx.Module):
    router: jax.Array
    up: jax.Array  # experts, inputs, hidden
    down: jax.Array  # experts, hidden, outputs

    def __call__(self, x):
        weights, ids = lax.top_k(jax.nn.softmax(x @ self.router), 2)
        h = jnp.einsum("td,tedh->teh", x, self.up[ids])
        y = jnp.einsum("teh,tehd->ted", jax.nn.silu(h), self.down[ids])
        return jnp.einsum("ted,te->td", y, weights)


class Ragged(eqx.Module):
    experts: Experts

    def __call__(self, x):
        ids = jnp.argmax(x @ self.experts.router, axis=-1)
        order = jnp.argsort(ids)
        sizes = jnp.bincount(ids, length=self.experts.up.shape[0])
        h = lax.ragged_dot(x[order], self.experts.up, sizes)
        y = lax.ragged_dot(jax.nn.silu(h), self.experts.down, sizes)
        return jnp.zeros_like(y).at[order].set(y)


def experts():
    up, down = 0.2 * normal(4, 16, 24, seed=1), 0.2 * normal(4, 24, 16, seed=2)
    return Experts(normal(16, 4), up, down)


def attention():
    return Attention(0.3 * normal(3, 16, 2, 8), 0.3 * normal(2, 8, 16, seed=1))


def second_to_last(w):
    return 1 if w.ndim == 4 else (0, 1) if w.shape == (2, 8, 16) else -2


models = {
    "convolutions": (lambda: ConvNet(jr.key(0)), all_but_first, (4, 7, 7)),
    "weight-norm": (
        lambda: eqx.nn.WeightNorm(eqx.nn.Linear(16, 12, key=jr.key(0))),
        all_but_first,
        (16,),
    ),
    "attention": (attention, second_to_last, (6, 16)),
    "experts": (experts, second_to_last, (6, 16)),
    "ragged": (lambda: Ragged(experts()), second_to_last, (6, 16)),
    "lstm": (lambda: eqx.nn.LSTMCell(16, 16, key=jr.key(0)), all_but_first, None),
}


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", models)
def test_model(name):
    make, axis, shape = models[name]
    model = quantized(make(), axis)
    if shape is None:
        call = lambda m, x: m(x, (jnp.tanh(x), x))[0]
        shape = (16,)
    else:
        call = lambda m, x: m(x)
    dense = eqq.tree_dequantize(model)
    xs = normal(3, *shape, seed=3)

    # Of one, of several, scanned over, and the derivative.
    def everything(call):
        def fn(model, xs):
            # (JAX cannot map the ragged product.)
            mapped = None
            if name != "ragged":
                mapped = jax.vmap(lambda x: call(model, x))(xs)
            _, scanned = lax.scan(lambda c, x: (c, call(model, x)), None, xs)
            loss = lambda x: jnp.sum(jnp.sin(call(model, x)))
            return call(model, xs[0]), mapped, scanned, jax.grad(loss)(xs[0])

        return eqx.filter_jit(fn)

    expected = everything(call)(dense, xs)
    for fn in (everything(implicit(call)), implicit(everything(call))):
        assert_close(fn(model, xs), expected, 1e-3)

    kinds = {use.kind for use in uses_in(traced_implicit(call, model, xs[0]))}
    assert kinds == {"dequantize" if name == "weight-norm" else "product"}


# No gradient reaches what is quantized, and the rest trains.
def test_training():
    model = quantized(ConvNet(jr.key(0)), all_but_first)
    spec = eqq.trainable_spec(model)
    trainable, frozen = eqx.partition(model, spec)

    def loss(trainable, model, x):
        return jnp.sum(implicit(eqx.combine(trainable, model))(x) ** 2)

    def reference(trainable, model, x):
        both = eqx.combine(trainable, model)
        return jnp.sum(eqq.tree_dequantize(both)(x) ** 2)

    x = normal(4, 7, 7)
    gradient = eqx.filter_jit(eqx.filter_grad(loss))(trainable, frozen, x)
    expected = eqx.filter_jit(eqx.filter_grad(reference))(trainable, frozen, x)
    assert_close(gradient, expected, 1e-3)
