import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant import implicit

from ..helpers import formats, normal
from .same import assert_close, assert_same, assert_same_gradient


some_formats = pytest.mark.parametrize("name", ("int8-32", "ternary-tensor"))


def matrix(name="nf4", axis=-2):
    return eqq.quantize(0.1 * normal(64, 48), formats[name], axis=axis)


def negated(q):
    return implicit(lambda w: -w)(q)


def stack(name="nf4"):
    return eqq.quantize(0.1 * normal(3, 64, 48), formats[name])


x = normal(5, 64, seed=1)


def layer(x, w):
    return jnp.tanh(x @ w @ w.T)


@pytest.mark.examples(1)
@some_formats
def test_jit(name):
    fn = lambda x, w: jax.jit(layer)(jax.jit(layer)(x, w), w)
    assert_same(fn, x, matrix(name), packed=True, read=4)
    assert_same_gradient(fn, x, matrix(name))
    assert_same(jax.jit(lambda w: (w.T, w + 1.0, 2.0)), matrix(name))


def test_jit_is_compiled_once():
    count = 0

    @jax.jit
    def fn(x, w):
        nonlocal count
        count += 1
        return layer(x, w)

    for _ in range(3):
        implicit(fn)(x, matrix())
        implicit(lambda x, w: fn(x, w) + fn(x, w))(x, matrix())
    assert count == 1
    text = jax.jit(implicit(lambda x, w: fn(fn(x, w), w))).lower(x, matrix()).as_text()
    assert text.count("func.func private @_jitted") == 1


@pytest.mark.examples(1)
@some_formats
def test_scan(name):
    def fn(x, ws):
        def step(x, w):
            x = layer(x, w)
            return x, (x[0], w.mT)

        return lax.scan(step, x, ws, reverse=True)

    y, (_, ws) = assert_same(fn, x, stack(name), read=2)
    assert not eqq.is_quantized(y) and eqq.is_quantized(ws)
    assert_same_gradient(lambda x, ws: fn(x, ws)[0], x, stack(name))


def test_scan_over_rows_and_blocks():
    body = lambda c, row: (c + jnp.sum(row), row)
    for axis in (-1, -2):
        assert_same(lambda w: lax.scan(body, 0.0, w), matrix(axis=axis))
    assert_same(lambda w: lax.scan(lambda c, w: (c, w[0]), 0.0, w), stack())
    deep = eqq.quantize(normal(3, 4, 16), axis=0)
    assert_same(
        lambda w: lax.scan(lambda c, w: (c + w, None), jnp.zeros((4, 16)), w), deep
    )
    assert_same(lambda w: lax.scan(lambda c, w: (c, w @ x.T), 0.0, w[:0]), stack().mT)


@pytest.mark.examples(1)
@some_formats
def test_carries(name):
    q = matrix(name)

    def around(x, w):
        step = lambda c, _: ((layer(*c), c[1]), None)
        return lax.scan(step, (x, w), None, length=3)[0]

    y, w = assert_same(around, x, q, read=2)
    assert eqq.is_quantized(w)

    def swapped(a, b, x):
        step = lambda c, _: ((c[1], c[0]), x @ c[0])
        return lax.scan(step, (a, b), None, length=3)

    (a, _), _ = assert_same(swapped, q, negated(q), x, read=1)
    assert eqq.is_quantized(a)
    # What comes out is not what went in.
    changed = lambda w: lax.scan(lambda w, _: (0.5 * w + 1.0, None), w, None, length=3)
    assert_same(changed, q)
    other = eqq.quantize(normal(64, 48), "binary", axis=-1)
    assert_same(swapped, q, other, x)
    assert_same_gradient(lambda x, w: around(x, w)[0], x, q)


@pytest.mark.examples(1)
@some_formats
def test_while(name):
    def fn(x, w):
        def go_on(c):
            i, x, w = c
            return (i < 4) & (jnp.sum(x @ w) < 1e6)

        def step(c):
            i, x, w = c
            return i + 1, x + layer(x, w), w

        return lax.while_loop(go_on, step, (0, x, w))[1:]

    _, w = assert_same(fn, x, matrix(name), read=3)
    assert eqq.is_quantized(w)
    count = lambda w: lax.fori_loop(0, 3, lambda i, w: w + 1.0, w)
    assert_same(count, matrix(name))


@pytest.mark.examples(1)
@some_formats
def test_cond(name):
    q = matrix(name)
    for flag in (True, False):
        fn = lambda x, w: lax.cond(flag, layer, lambda x, w: x @ w @ w.T * 2.0, x, w)
        assert_same(fn, x, q)
        assert_same_gradient(fn, x, q)
        picked = lambda a, b: lax.cond(jnp.asarray(flag), lambda: a, lambda: b)
        assert_same(picked, q, negated(q), packed="result")
        assert_same(picked, q, eqq.quantize(normal(64, 48), "binary"))
    for i in range(4):
        fn = lambda i, w: lax.switch(i, [jnp.exp, lambda w: w, lambda w: 2.0 * w], w)
        assert_same(fn, jnp.asarray(i), q)


@pytest.mark.examples(1)
@some_formats
@pytest.mark.parametrize("spec", (P(), P("d"), P(None, "d")))
def test_shard_map(name, spec):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def call(x, w):
        y = jnp.tanh(x @ w)
        return lax.psum(y, "d") if spec == P("d") else y

    def fn(x, w):
        x_spec = P(None, "d") if spec == P("d") else P()
        out_spec = P() if spec == P("d") else spec
        sharded = jax.shard_map(
            call, mesh=mesh, in_specs=(x_spec, spec), out_specs=out_spec
        )
        return sharded(x, w)

    q = eqq.quantize(normal(320, 48), formats[name])
    rows = 0.1 * normal(5, 320)
    assert_same(fn, rows, q, packed=True, read=1)
    assert_same_gradient(fn, rows, q)
    if spec == P("d"):
        # That cuts a block.
        assert_same(fn, rows[:, :192], eqq.quantize(normal(192, 48)), read=0)


def test_implicit_in_shard_map():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    q = matrix()
    fn = jax.shard_map(
        lambda x, s: implicit(lambda x, w: jnp.einsum("bi,io->bo", x, w) + w[:1])(
            x, eqx.tree_at(lambda q: q.stored, q, s)
        ),
        mesh=mesh,
        in_specs=(P(), P(None, "d")),
        out_specs=P(None, "d"),
    )
    assert_close(fn(x, q.stored), x @ q.dequantize() + q.dequantize()[:1])


def test_what_was_declared_is_transposed():
    q = stack().with_sharding(P(None, "d", None))
    assert implicit(lambda w: w.mT)(q).sharding == P(None, None, "d")
    step = lambda c, w: (c, w.mT)
    _, ws = implicit(lambda w: lax.scan(step, None, w))(q)
    assert ws.sharding == P(None, "d")


def test_sharding_constraint():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    for spec in (P("d"), P(None, "d"), P()):
        sharding = NamedSharding(mesh, spec)
        fn = lambda w: lax.with_sharding_constraint(w, sharding)
        assert_same(fn, eqq.quantize(normal(128, 48)), packed="result")
    # That would cut a block.
    sharding = NamedSharding(mesh, P("d"))
    assert_same(lambda w: lax.with_sharding_constraint(w, sharding), matrix())


@pytest.mark.examples(1)
@some_formats
def test_vmap(name):
    q = stack(name)
    xs = normal(3, 5, 64)
    fn = lambda x, w: jnp.einsum("bi,io->bo", x, w) + jnp.sum(w, axis=0)[None]
    for axes in ((0, 0), (None, 0)):
        rows = xs if axes[0] == 0 else xs[0]
        inside = implicit(jax.vmap(fn, in_axes=axes))
        outside = jax.vmap(implicit(fn), in_axes=axes)
        expected = jax.vmap(fn, in_axes=axes)(rows, q.dequantize())
        assert_close(inside(rows, q), expected)
        assert_close(outside(rows, q), expected)
        assert_close(jax.jit(outside)(rows, q), expected)


def test_nested():
    fn = lambda x, w: implicit(layer)(jnp.tanh(x), w)
    assert_same(fn, x, matrix(), packed=True, read=2)
    twice = implicit(implicit(layer))
    assert_close(twice(x, matrix()), layer(x, matrix().dequantize()))


@pytest.mark.parametrize("carried", (False, True))
def test_loops_that_stop_by_themselves(carried):
    # Of `vmap` inside: the condition is of many loops at once.
    weights = eqq.quantize(0.3 * normal(5, 16, 16), formats["int8"], axis=-1)

    def each(x, w):
        go_on = lambda c: jnp.abs(c[0][0]) > 0.1
        if carried:
            step = lambda c: (0.3 * c[0] @ c[1], c[1])
            return jax.lax.while_loop(go_on, step, (x, w))[0]
        return jax.lax.while_loop(go_on, lambda c: (0.3 * c[0] @ w,), (x,))[0]

    assert_same(jax.vmap(each), normal(5, 16, seed=1), weights)
    if not carried:
        fn = lambda x, w: jax.vmap(lambda x: each(x, w))(x)
        assert_same(fn, normal(5, 16, seed=1), weights[0])


def test_cond_mapped():
    a, b = (eqq.quantize(normal(16, 16, seed=i), formats["int8"]) for i in range(2))

    def pick(x, a, b):
        return x @ lax.cond(x[0] > 0, lambda: a, lambda: b)

    assert_same(jax.vmap(pick, (0, None, None)), normal(5, 16, seed=2), a, b)


def test_constant_results():
    q = eqq.quantize(normal(16, 16), formats["int8"])
    fn = lambda w: (jnp.array(True), jnp.zeros(()), jnp.array(3, jnp.uint8), w.sum())
    assert_same(fn, q)
    out = implicit(fn)(q)
    assert all(isinstance(a, jax.Array) for a in out)
