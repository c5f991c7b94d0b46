import functools as ft

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import eqquant as eqq
from eqquant import implicit

from ..helpers import formats, normal
from .same import assert_close, assert_same, assert_same_gradient


some_formats = pytest.mark.parametrize("name", ("int8-32", "ternary-tensor"))


def matrix(name="nf4", axis=-2):
    return eqq.quantize(0.1 * normal(64, 48), formats[name], axis=axis)


x = normal(5, 64, seed=1)


def layer(x, w):
    return jnp.tanh(x @ w @ w.T)


@jax.custom_vjp
def with_vjp(x, w):
    return x @ w


with_vjp.defvjp(
    lambda x, w: (x @ w, (x, w)), lambda r, g: (3.0 * g @ r[1].T, r[0].T @ g)
)


@jax.custom_jvp
def with_jvp(x, w, n):
    return x @ w, n


@with_jvp.defjvp
def _(primals, tangents):
    x, w, n = primals
    dx, dw, dn = tangents
    return with_jvp(x, w, n), (3.0 * dx @ w + x @ dw, dn)


@pytest.mark.examples(1)
@some_formats
def test_custom_derivatives(name):
    q = matrix(name)
    n = jnp.asarray(3)
    second = lambda x, w: with_jvp(x, w, n)[0]
    for fn in (with_vjp, second, jax.jit(with_vjp), jax.checkpoint(second)):
        assert_same(fn, x, q, packed=True, read=1)
        assert_same_gradient(fn, x, q)
        assert_same_gradient(jax.vmap(fn, in_axes=(0, None)), x[:, None], q)
    tangent = lambda x, w: jax.jvp(lambda x: second(x, w), (x,), (x,))
    assert_same(tangent, x, q, packed=True)
    outside = jax.jvp(lambda x: implicit(second)(x, q), (x,), (x,))
    assert_close(outside, tangent(x, q.dequantize()))


def test_custom_derivatives_of_jax():
    q = matrix(axis=-1)
    fns = (jax.nn.relu, jax.nn.gelu, jax.nn.silu, jax.nn.logsumexp, jax.nn.relu6)
    assert_same(lambda w: [fn(w) for fn in fns], q)
    every = lambda x, w: [fn(x @ w.T) for fn in fns] + [fn(x[0, 0] * w) for fn in fns]
    assert_same_gradient(every, x[:, :48], q)


def test_custom_derivatives_are_kept():
    # At zero, of which a square root has no derivative but this one.
    @jax.custom_jvp
    def root(a, b):
        return jnp.sqrt(jnp.abs(a @ b))

    root.defjvp(lambda p, t: (root(*p), 7.0 * t[0] @ p[1] + 0.0 * t[1][:1]))
    assert_same_gradient(root, jnp.zeros((5, 64)), matrix())


# What the backward pass keeps of each layer is packed.
@pytest.mark.optimized
@pytest.mark.parametrize("remat", (False, True))
def test_residuals(remat):
    def loss(x, ws):
        step = lambda x, w: (with_vjp(jnp.tanh(x), w), None)
        step = jax.checkpoint(step) if remat else step
        return jnp.sum(lax.scan(step, x, ws)[0])

    q = jax.eval_shape(eqq.quantize, jax.ShapeDtypeStruct((16, 256, 256), jnp.float32))
    rows = jax.ShapeDtypeStruct((8, 256), jnp.float32)
    for gradient in (jax.grad(implicit(loss)), implicit(jax.grad(loss))):
        compiled = jax.jit(gradient).lower(rows, q).compile()
        # Dense, the sixteen take 4.2 MB, and one takes 0.26 MB.
        assert compiled.memory_analysis().temp_size_in_bytes < 1.6e6


@some_formats
def test_checkpoint(name):
    fn = lambda x, w: jax.checkpoint(layer)(jax.checkpoint(layer)(x, w), w)
    assert_same(fn, x, matrix(name), packed=True, read=4)
    assert_same_gradient(fn, x, matrix(name))
    saved = ft.partial(jax.checkpoint, policy=jax.checkpoint_policies.dots_saveable)
    assert_same_gradient(lambda x, w: saved(layer)(x, w), x, matrix(name))
    jaxpr = jax.make_jaxpr(implicit(jax.grad(lambda x, w: jnp.sum(fn(x, w)))))
    text = str(jaxpr(x, matrix(name)))
    assert "differentiated=True" in text
