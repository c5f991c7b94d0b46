import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq

from .helpers import normal


# Modules that read the weight of a layer, in place of calling it.


class Reader(eqx.Module):
    """Calls a function of a layer's weight and of the input."""

    layer: eqx.Module
    use: object = eqx.field(static=True)

    def __call__(self, x):
        return self.use(self.layer.weight, x)


class Experts(eqx.Module):
    experts: eqx.nn.Linear
    router: eqx.nn.Linear

    def __init__(self, key):
        make = eqx.filter_vmap(
            lambda key: eqx.nn.Linear(32, 48, use_bias=False, key=key)
        )
        self.experts = make(jr.split(key, 4))
        self.router = eqx.nn.Linear(32, 32, key=key)

    def __call__(self, x):
        x = jax.vmap(self.router)(x)
        sizes = jnp.array([2, 0, 1, 3])
        return lax.ragged_dot(x, self.experts.weight.transpose(0, 2, 1), sizes)


class Outer(eqx.Module):
    """Reads past a module that is called, too."""

    inner: Experts
    norm: eqx.nn.RMSNorm

    def __call__(self, x):
        w = self.inner.experts.weight
        y = jnp.einsum("eoi,bi->beo", w, jax.vmap(self.norm)(x))
        return y.sum(1) + self.inner(x)


def linear(key):
    return eqx.nn.Linear(32, 32, key=key)


def embedding(key):
    return eqx.nn.Embedding(32, 32, key=key)


uses = {
    "matmul": lambda w, x: x @ w.T,
    "einsum": lambda w, x: jnp.einsum("oi,bi->bo", w, x),
    "dot": lambda w, x: jnp.dot(x, w.T),
    "dot_general": lambda w, x: lax.dot_general(x, w, (((1,), (1,)), ((), ()))),
    "matvec": lambda w, x: jax.vmap(jnp.matmul, (None, 0))(w, x),
    "heads": lambda w, x: jnp.einsum("hoi,bi->bho", w.reshape(4, 8, 32), x),
    "attention": lambda w, x: jax.nn.dot_product_attention(
        x[None, :, None], w[None, :, None], w[None, :, None]
    )[0, :, 0],
    "take": lambda w, x: jnp.take(w, jnp.array([3, 1]), axis=0),
    "logits": lambda w, x: jax.nn.log_softmax(x @ w.swapaxes(0, 1)),
    "norm": lambda w, x: x * jnp.linalg.norm(w),
    "loop": lambda w, x: lax.fori_loop(0, 3, lambda i, x: jnp.dot(x, w) / 8, x),
    "concatenate": lambda w, x: x @ jnp.concatenate([w, w], axis=0).T,
    "conv": lambda w, x: lax.conv_general_dilated(
        x.T[None], w[..., None], (1,), "VALID"
    ),
}
models = {
    f"{name}-{make.__name__}": (lambda key, f=f, make=make: Reader(make(key), f))
    for name, f in uses.items()
    for make in (linear, embedding)
    if make is linear or name in ("take", "logits", "norm")
}
models["experts"] = Experts
models["outer"] = lambda key: Outer(Experts(key), eqx.nn.RMSNorm(32))
all_models = pytest.mark.parametrize("name", models)
x = normal(6, 32)


def quantized(dense, **kwargs):
    return eqq.tree_quantize(dense, "int8", min_size=0, embeddings=True, **kwargs)


def close(y, z):
    np.testing.assert_allclose(y, z, rtol=1e-3, atol=1e-3)


@pytest.mark.examples(2)
@all_models
def test_on_call(name):
    dense = models[name](jr.key(0))
    model = quantized(dense, unsupported="on_call")
    assert isinstance(model, type(dense))
    leaves = jtu.tree_leaves(model, is_leaf=eqq.is_quantized)
    assert any(map(eqq.is_quantized, leaves))
    plain = eqq.tree_dequantize(model)
    assert jtu.tree_structure(plain) == jtu.tree_structure(dense)
    expected = eqx.filter_jit(plain)(x)
    close(eqx.filter_jit(model)(x), expected)
    close(model(x), expected)

    @eqx.filter_jit
    def gradient(x, model):
        return jax.grad(lambda x: jnp.sum(jnp.sin(model(x))))(x)

    close(gradient(x, model), gradient(x, plain))


# What arrays do themselves needs nothing.
runs = ("matmul", "heads", "logits", "attention", "conv")


@all_models
def test_errors_say_what_to_do(name):
    model = quantized(models[name](jr.key(0)))
    if name.split("-")[0] in runs:
        close(model(x), eqq.tree_dequantize(model)(x))
        return
    for call in (model, eqx.filter_jit(model)):
        with pytest.raises((TypeError, ValueError), match="='on_call'") as error:
            call(x)
        assert "`eqquant.implicit(" in str(error.value)
        assert any(f"{n}, {k})" in str(error.value) for n in (32, 48) for k in (32, 48))
        assert re.search(r"\), `[a-z.]*weight` of `[A-Z]\w+`, was", str(error.value))


def is_stand_in(x):
    return isinstance(x, eqq.train.LoRA | eqq.train.FakeQuantized)


@pytest.mark.examples(9)
@pytest.mark.parametrize("name", ("experts", *(f"{n}-linear" for n in runs)))
@pytest.mark.parametrize("kind", ("lora", "qlora", "fake"))
def test_training(name, kind):
    model = models[name](jr.key(0))
    if kind == "fake":
        model = eqq.train.tree_fake_quantize(model, "int8", min_size=0)
    else:
        model = quantized(model, unsupported="on_call") if kind == "qlora" else model
        model, _ = eqq.train.lora(model, 2, min_size=0, key=jr.key(1))
    ordinary = lambda x: x.dequantize() if is_stand_in(x) else x
    plain = jtu.tree_map(ordinary, model, is_leaf=is_stand_in)
    assert any(map(is_stand_in, jtu.tree_leaves(model, is_leaf=is_stand_in)))
    close(eqx.filter_jit(model)(x), eqx.filter_jit(eqq.tree_dequantize(plain))(x))


def test_layers_of_equinox_stay():
    mlp = eqx.nn.MLP(32, 32, 32, 2, key=jr.key(0))
    model = quantized(
        eqx.nn.Sequential([mlp, linear(jr.key(1))]), unsupported="on_call"
    )
    assert type(model) is eqx.nn.Sequential
    assert type(model[0]) is eqx.nn.MLP and type(model[1]) is eqx.nn.Linear


def test_methods_of_users_are_not_of_equinox():
    class Jitted(eqx.Module):
        layer: eqx.nn.Linear

        @eqx.filter_jit
        def __call__(self, x):
            return jnp.dot(x, self.layer.weight.T)

    model = quantized(Jitted(linear(jr.key(0))), unsupported="on_call")
    close(model(x), eqq.tree_dequantize(model)(x))


@pytest.mark.parametrize(
    "function",
    [
        jnp.exp,
        jnp.sum,
        jax.nn.relu,
        jax.nn.softmax,
        jnp.asarray,
        jax.typeof,
        lax.exp,
        lambda w: lax.mul(w, w),
        lambda w: jnp.stack([w, w]),
        lambda w: jnp.where(True, w, 0.0),
        lambda w: jnp.linalg.svd(w),
        lambda w: x.at[:].set(w[:6]) + lax.dynamic_slice(w, (0, 0), (6, 32)),
    ],
)
def test_functions_of_jax(function):
    w = normal(32, 32)
    adapted, _ = eqq.train.lora({"w": w}, 2, key=jr.key(0))
    fake = eqq.train.tree_fake_quantize({"w": w}, "int8")
    for stand_in in (eqq.quantize(w, "int8"), adapted["w"], fake["w"]):
        said = "was passed where an ordinary array is needed"
        for fn in (function, jax.jit(function)):
            with pytest.raises((TypeError, ValueError), match=said) as error:
                fn(stand_in)
            assert "(32, 32)" in str(error.value)
        assert not eqx.is_array_like(stand_in)
        assert str(stand_in) == repr(stand_in)
        assert (x @ stand_in).shape == (6, 32)
