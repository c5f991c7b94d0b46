import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq

from .helpers import formats, normal, trees_equal


some_formats = pytest.mark.parametrize(
    "name", ("nf4", "int4-affine", "ternary-tensor", "nested")
)
close = ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def assert_tree_close(a, b):
    jtu.tree_map(close, a, b)


@pytest.mark.examples(1)
@some_formats
def test_jit(name):
    format = formats[name]
    q = eqq.quantize(normal(70, 5), format)
    x = normal(2, 70)
    fs = (lambda x, q: x @ q, lambda x, q: q.T @ x.T, lambda x, q: q.dequantize())
    every = lambda x, q: [f(x, q) for f in fs]
    eager = every(x, q)
    for jitted in (jax.jit(every), eqx.filter_jit(every)):
        for found, expected in zip(jitted(x, q), eager, strict=True):
            np.testing.assert_array_equal(found, expected)
    closed_over = jax.jit(lambda x: every(x, q))
    for found, expected in zip(closed_over(x), eager, strict=True):
        np.testing.assert_array_equal(found, expected)
    inside = jax.jit(lambda w: eqq.quantize(w, format))(normal(70, 5))
    assert trees_equal(inside, q)


def test_quantizing_what_is_closed_over():
    x = normal(2, 70)
    for w in (normal(70, 5), np.asarray(normal(70, 5))):
        y = jax.jit(lambda x: x @ eqq.quantize(w))(x)
        close(y, x @ eqq.quantize(w))


def test_disabled_jit():
    q = eqq.quantize(normal(70, 5))
    x = normal(2, 70)
    with jax.disable_jit():
        y = x @ q
        gradient = jax.grad(lambda x: jnp.sum(x @ q))(x)
        rows = jax.vmap(lambda x: q.T @ x)(x)
    close(y, x @ q)
    close(rows, x @ q)
    close(gradient, jnp.ones((2, 5)) @ q.T)


def test_equal_formats_compile_once():
    traced = []

    @jax.jit
    def product(x, q):
        traced.append(q.format)
        return x @ q

    for seed in range(3):
        product(normal(2, 70), eqq.quantize(normal(70, 5, seed=seed), eqq.NF4(64)))
    assert len(traced) == 1
    product(normal(2, 70), eqq.quantize(normal(70, 5), eqq.NF4(32)))
    assert len(traced) == 2


def product(x, w):
    return jnp.sin(x @ w)


@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("nf4", "ternary-tensor"))
def test_vmap(name):
    q = eqq.quantize(normal(3, 70, 5), formats[name])
    w = q.dequantize()
    one = eqq.quantize(normal(70, 5), formats[name])
    x = normal(3, 2, 70)

    # Over `x`, wherever its axis is.
    close(jax.vmap(lambda x: x @ one)(x), x @ one)
    mapped = jax.vmap(product, in_axes=(1, None), out_axes=1)(x, one)
    close(mapped, product(x, one))
    mapped = jax.vmap(lambda x: one.T @ x, in_axes=2, out_axes=2)(x.transpose(2, 1, 0))
    close(mapped, (x @ one).transpose(2, 1, 0))
    close(jax.vmap(jax.vmap(product, (0, None)), (0, None))(x, one), product(x, one))

    # Over `q`, and over both.
    each = [product(x[0], q[i]) for i in range(3)]
    close(jax.vmap(product, in_axes=(None, 0))(x[0], q), jnp.stack(each))
    close(jax.vmap(product, in_axes=(None, 0))(x[0], w), jnp.stack(each))
    each = [product(x[i], q[i]) for i in range(3)]
    close(jax.vmap(product)(x, q), jnp.stack(each))
    close(jax.vmap(product, in_axes=(2, 0))(x.transpose(1, 2, 0), q), jnp.stack(each))
    close(jax.vmap(lambda x, q: q.T @ x.T)(x, q), (x @ w).mT)

    # Over one of them, then over the other: every pair.
    pairs = jnp.stack([product(x, q[i]) for i in range(3)])
    over_x = jax.vmap(product, in_axes=(0, None))
    close(jax.vmap(over_x, in_axes=(None, 0))(x, q), pairs)
    over_q = jax.vmap(product, in_axes=(None, 0))
    close(jax.vmap(over_q, in_axes=(0, None))(x, q), pairs.swapaxes(0, 1))


def test_vmap_over_any_axis_of_a_stack():
    q = eqq.quantize(normal(2, 3, 70, 5))
    w = q.dequantize()
    x = normal(3, 4, 70)
    mapped = jax.vmap(product, in_axes=(0, 1))(x, q)
    close(mapped, jnp.stack([product(x[i], w[:, i]) for i in range(3)]))
    mapped = jax.vmap(lambda q: q.dequantize(), in_axes=1, out_axes=1)(q)
    close(mapped, w)
    mapped = jax.vmap(jax.vmap(product, in_axes=(0, 0)), in_axes=(None, 0))(x, q)
    close(mapped, product(x, w))
    in_turn = jax.vmap(jax.vmap(product, in_axes=(None, 0)), in_axes=(0, 1))(x, q)
    close(in_turn, jnp.stack([product(x[i], w[:, i]) for i in range(3)]))


def test_vmap_of_derivatives():
    q = eqq.quantize(normal(3, 70, 5))
    x = normal(3, 2, 70)

    def gradient(x, w):
        return jax.grad(lambda x: jnp.sum(product(x, w)))(x)

    w = q.dequantize()
    close(jax.vmap(gradient)(x, q), jax.vmap(gradient)(x, w))
    close(
        jax.vmap(gradient, (0, None))(x, q[1]), jax.vmap(gradient, (0, None))(x, w[1])
    )
    over_q = jax.vmap(gradient, in_axes=(None, 0))
    close(over_q(x[0], q), over_q(x[0], w))
    # The derivative of a mapped product.
    total = jax.grad(lambda x, w: jnp.sum(jax.vmap(product)(x, w)))
    close(total(x, q), total(x, w))
    total = jax.grad(lambda x, w: jnp.sum(jax.vmap(product, (None, 0))(x, w)))
    close(total(x[0], q), total(x[0], w))


def test_vmap_of_activation():
    # Each row has a scale of its own, mapped or not.
    q = eqq.quantize(normal(3, 70, 5), "int8", activation="int8")
    x = normal(3, 2, 70)
    close(jax.vmap(lambda x: x @ q[0])(x), x @ q[0])
    close(jax.vmap(jax.vmap(lambda x: x @ q[0]))(x), x @ q[0])
    close(jax.vmap(product)(x, q), jnp.stack([product(x[i], q[i]) for i in range(3)]))


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "name, remat",
    (("nf4", False), ("nf4", True), ("ternary-tensor", False), ("nested", True)),
)
def test_scan(name, remat):
    q = eqq.quantize(normal(3, 70, 70) / 8, formats[name])
    x = normal(2, 70)
    layer = jax.checkpoint(product) if remat else product

    def scanned(x, q):
        return lax.scan(lambda x, q: (layer(x, q), jnp.sum(x)), x, q)

    def looped(x, q):
        sums = []
        for i in range(3):
            sums.append(jnp.sum(x))
            x = product(x, q[i])
        return x, jnp.stack(sums)

    assert_tree_close(scanned(x, q), looped(x, q))
    gradient = jax.grad(lambda x: jnp.sum(scanned(x, q)[0]))(x)
    close(gradient, jax.grad(lambda x: jnp.sum(looped(x, q.dequantize())[0]))(x))
    assert_tree_close(
        jax.jvp(lambda x: scanned(x, q)[0], (x,), (x,)),
        jax.jvp(lambda x: looped(x, q)[0], (x,), (x,)),
    )


def test_control_flow():
    a, b = eqq.quantize(normal(70, 70) / 8), eqq.quantize(normal(70, 70, seed=1) / 8)
    x = normal(2, 70)
    for known in (True, False):
        chosen = lax.cond(known, lambda: a, lambda: b)
        assert trees_equal(chosen, a if known else b)
        y = jax.jit(lambda p: lax.cond(p, product, lambda x, q: x, x, a))(known)
        close(y, product(x, a) if known else x)
    assert trees_equal(jtu.tree_map(lambda a, b: jnp.where(True, a, b), a, b), a)

    def step(carry):
        i, x, q = carry
        return i + 1, product(x, q), q

    _, y, q = lax.while_loop(lambda carry: carry[0] < 3, step, (0, x, a))
    close(y, product(product(product(x, a), a), a))
    assert trees_equal(q, a)
    y = lax.fori_loop(0, 2, lambda i, x: product(x, a), x)
    close(y, product(product(x, a), a))


def test_map_and_switch_over_experts():
    q = eqq.quantize(normal(3, 70, 5))
    x = normal(4, 70)
    ids = jnp.array([0, 2, 1, 2])
    expected = jnp.stack([x[i] @ q[int(ids[i])] for i in range(4)])
    close(lax.map(lambda xi: xi[0] @ q[xi[1]], (x, ids)), expected)
    close(jax.vmap(lambda x, i: x @ q[i])(x, ids), expected)
    close(jax.vmap(lambda x, i: x @ q[i], in_axes=(None, 0))(x, ids)[1], x @ q[2])


def test_quantizing_within_vmap_and_scan():
    w = normal(3, 70, 5)
    x = normal(2, 70)
    expected = jnp.stack([x @ eqq.quantize(w[i]) for i in range(3)])
    close(jax.vmap(lambda w: x @ eqq.quantize(w))(w), expected)
    close(
        jax.vmap(lambda w: x @ eqq.quantize(w), in_axes=2)(w.transpose(1, 2, 0)),
        expected,
    )
    close(lax.map(lambda w: x @ eqq.quantize(w), w), expected)
    close(
        jax.vmap(lambda w: eqq.quantize(w, axis=-1).dequantize())(w.mT).mT,
        eqq.quantize(w).dequantize(),
    )
