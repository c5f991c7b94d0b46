import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq

from .helpers import error, formats, native_formats, normal


some_formats = pytest.mark.parametrize(
    "name", ("nf4", "int4-affine", "ternary-tensor", "nested")
)
close = ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def assert_tree_close(a, b):
    jtu.tree_map(close, a, b)


#
# Derivatives
#


def fn(w, x):
    """Of rows and of vectors, from either side."""
    y = jnp.sin(x @ w)
    z = jnp.sum(w.mT @ x.mT, axis=-1)
    return jnp.sum(y, axis=0) * z + w.mT @ x[0]


@jax.jit
def first_derivatives(w, x, v):
    f = ft.partial(fn, w)
    y, vjp = jax.vjp(f, x)
    return dict(
        grad=jax.grad(lambda x: jnp.sum(f(x) ** 2))(x),
        jvp=jax.jvp(f, (x,), (v,)),
        vjp=vjp(jnp.cos(y)),
        transpose=jax.linear_transpose(lambda x: x @ w, x)(v @ w),
    )


@jax.jit
def other_derivatives(w, x, v):
    f = ft.partial(fn, w)
    gradient = jax.grad(lambda x: jnp.sum(f(x) ** 2))
    return dict(
        hvp=jax.jvp(gradient, (x,), (v,))[1],
        reverse_hvp=jax.grad(lambda x: jnp.sum(gradient(x) * v))(x),
        jacfwd=jax.jacfwd(f)(x),
        jacrev=jax.jacrev(f)(x),
        linearize=jax.linearize(f, x)[1](v),
        left_transpose=jax.linear_transpose(lambda x: w.mT @ x.mT, x)(w.mT @ v.mT),
    )


@native_formats
def test_first_derivatives(format):
    q = eqq.quantize(normal(70, 5), format)
    x, v = 0.1 * normal(2, 70, seed=1), normal(2, 70, seed=2)
    expected = first_derivatives(q.dequantize(), x, v)
    assert_tree_close(first_derivatives(q, x, v), expected)


@pytest.mark.parametrize(
    "name, axis", (("nf4", -1), ("int4-affine", -2), ("ternary-tensor", -1))
)
def test_other_derivatives(name, axis):
    q = eqq.quantize(normal(70, 5), formats[name], axis=axis)
    x, v = 0.1 * normal(2, 70, seed=1), normal(2, 70, seed=2)
    for derivatives in (first_derivatives, other_derivatives):
        expected = derivatives(q.dequantize(), x, v)
        assert_tree_close(derivatives(q, x, v), expected)


def test_derivatives_of_stacks():
    q = eqq.quantize(normal(3, 70, 5))

    def loss(x, w):
        return jnp.sum(jnp.sin(x @ w))

    for shape in ((70,), (4, 1, 2, 70)):
        x = normal(*shape, seed=1)
        close(jax.grad(loss)(x, q), jax.grad(loss)(x, q.dequantize()))
    hessian = jax.hessian(loss)(x, q)
    close(hessian, jax.hessian(loss)(x, q.dequantize()))


def test_derivatives_of_complex_numbers():
    q = eqq.quantize(normal(70, 5))
    x = lax.complex(normal(2, 70), normal(2, 70, seed=1))

    def loss(x, w):
        return jnp.sum(jnp.abs(x @ w) ** 2)

    dense = q.dequantize().astype(jnp.complex64)
    close(jax.grad(loss)(x, q), jax.grad(loss)(x, dense), rtol=1e-3)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_derivatives_have_the_dtype_of_x(dtype):
    q = eqq.quantize(normal(70, 5))
    x = normal(2, 70, dtype=dtype)
    gradient = jax.grad(lambda x: jnp.sum((x @ q).astype(jnp.float32)))(x)
    assert gradient.dtype == dtype
    rounding = 2 * float(jnp.finfo(dtype).eps)
    assert error(gradient, jnp.ones((2, 5)), q.dequantize().T) < rounding
    y, tangent = jax.jvp(lambda x: x @ q, (x,), (x,))
    assert y.dtype == tangent.dtype == dtype


@pytest.mark.parametrize("axis", (-1, -2))
def test_straight_through(axis):
    w, x, v = normal(70, 5), normal(2, 70, seed=1), normal(2, 70, seed=2)
    q = eqq.quantize(w, "int8", axis=axis, activation="int8")
    weight_only = eqq.quantize(w, "int8", axis=axis)
    rounded = eqq.quantize(x, "int8", axis=-1).dequantize()

    y, vjp = jax.vjp(lambda x: x @ q, x)
    close(y, rounded @ q.dequantize())
    (gradient,) = vjp(jnp.sin(y))
    close(gradient, jnp.sin(y) @ weight_only.T)
    close(jax.jvp(lambda x: x @ q, (x,), (v,))[1], v @ weight_only)
    close(jax.jacfwd(lambda x: x @ q)(x), jax.jacrev(lambda x: x @ q)(x))

    # The derivative is taken where the rounded rows are.
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w))

    expected = jax.grad(loss, argnums=1)(weight_only, rounded)
    close(jax.grad(loss, argnums=1)(q, x), expected)
    _, hvp = jax.jvp(jax.grad(ft.partial(loss, q)), (x,), (v,))
    _, expected = jax.jvp(jax.grad(ft.partial(loss, weight_only)), (rounded,), (v,))
    close(hvp, expected)


@native_formats
def test_no_gradient_reaches_what_is_stored(format):
    q = eqq.quantize(normal(70, 5), format)
    x = normal(2, 70)

    def loss(q, x):
        return jnp.sum(x @ q) + jnp.sum(q.dequantize())

    gradient = eqx.filter_grad(loss)(q, x)
    assert jtu.tree_leaves(gradient) == []
    _, (gradient, _) = eqx.filter_value_and_grad(lambda qx: loss(*qx))((q, x))
    assert jtu.tree_leaves(gradient) == []
    with pytest.raises(TypeError, match="grad requires real- or complex-valued inputs"):
        jax.grad(loss)(q, x)
    gradient = jax.grad(loss, allow_int=True)(q, x)
    assert all(g.dtype == jax.dtypes.float0 for g in jtu.tree_leaves(gradient))


def test_jvp_of_what_is_stored_is_zero():
    q = eqq.quantize(normal(70, 5))
    x = normal(2, 70)
    zeros = jtu.tree_map(lambda a: np.zeros(a.shape, jax.dtypes.float0), q)
    y, dy = jax.jvp(lambda x, q: x @ q, (x, q), (x, zeros))
    close(y, dy)
    y, dy = jax.jvp(lambda q: x @ q, (q,), (zeros,))
    close(y, x @ q)
    assert not jnp.any(dy)


#
# jit, vmap, scan
#


@some_formats
def test_jit(name):
    format = formats[name]
    q = eqq.quantize(normal(70, 5), format)
    x = normal(2, 70)
    for f in (lambda x, q: x @ q, lambda x, q: q.T @ x.T, lambda x, q: q.dequantize()):
        np.testing.assert_array_equal(jax.jit(f)(x, q), f(x, q))
        np.testing.assert_array_equal(eqx.filter_jit(f)(x, q), f(x, q))
        closed_over = jax.jit(lambda x: f(x, q))
        np.testing.assert_array_equal(closed_over(x), f(x, q))
    inside = jax.jit(lambda w: eqq.quantize(w, format))(normal(70, 5))
    assert eqx.tree_equal(inside, q)


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
        assert eqx.tree_equal(chosen, a if known else b)
        y = jax.jit(lambda p: lax.cond(p, product, lambda x, q: x, x, a))(known)
        close(y, product(x, a) if known else x)
    assert eqx.tree_equal(jtu.tree_map(lambda a, b: jnp.where(True, a, b), a, b), a)

    def step(carry):
        i, x, q = carry
        return i + 1, product(x, q), q

    _, y, q = lax.while_loop(lambda carry: carry[0] < 3, step, (0, x, a))
    close(y, product(product(product(x, a), a), a))
    assert eqx.tree_equal(q, a)
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


#
# Eight devices
#


def mesh(kind, *shape):
    names = ("a", "b")[: len(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape))


placements = pytest.mark.parametrize(
    "shape, spec",
    (
        ((8,), P(None, "a")),
        ((8,), P("a")),
        ((4, 2), P("b", "a")),
        ((4, 2), P(None, ("a", "b"))),
    ),
)
# With numbers of rows of which eighth parts are whole blocks, and whole bytes.
sharded_formats = pytest.mark.parametrize(
    "name, k", (("nf4", 512), ("ternary-48", 1920), ("nested", 4096))
)


@pytest.mark.parametrize("kind", (AxisType.Auto, AxisType.Explicit))
@placements
@sharded_formats
def test_placement(name, k, kind, shape, spec):
    q = eqq.quantize(normal(k, 16), formats[name])
    sharding = NamedSharding(mesh(kind, *shape), spec)
    sharded = q.with_sharding(sharding)
    assert sharded.is_sharded and not q.is_sharded
    assert sharded.placement.is_equivalent_to(sharding, 2)
    assert sharded.T.placement.is_equivalent_to(
        NamedSharding(sharding.mesh, P(*reversed((*spec, None)[:2]))), 2
    )
    assert eqx.tree_equal(jax.device_get(sharded.stored), jax.device_get(q.stored))
    codes = max(jtu.tree_leaves(sharded), key=lambda a: a.size)
    assert all(8 * shard.data.size == codes.size for shard in codes.addressable_shards)


@placements
@sharded_formats
def test_sharded(name, k, shape, spec):
    q = eqq.quantize(normal(k, 16), formats[name])
    sharded = q.with_sharding(NamedSharding(mesh(AxisType.Auto, *shape), spec))
    x = normal(4, k)

    @jax.jit
    def everything(x, q):
        y, vjp = jax.vjp(lambda x: x @ q, x)
        return y, vjp(y), q.T @ x.T, q.dequantize(), jax.vmap(lambda x: x @ q)(x)

    y, (gradient,), left, dense, mapped = everything(x, sharded)
    w = q.dequantize()
    assert error(y, x, w) < 1e-6
    assert error(mapped, x, w) < 1e-6
    assert error(left, w.T, x.T) < 1e-6
    assert error(gradient, y, w.T) < 1e-6
    np.testing.assert_array_equal(dense, w)


# What is declared is of the last axes, so it is true of what is stacked and indexed.
def test_sharded_stack():
    d = mesh(AxisType.Auto, 8)
    stack = eqq.quantize(normal(3, 64, 16))
    stack = stack.with_sharding(NamedSharding(d, P(None, None, "a")))
    matrix = stack[0]
    expected = NamedSharding(d, P(None, "a"))
    assert matrix.placement.is_equivalent_to(expected, 2)
    assert matrix.sharding.is_equivalent_to(expected, 2)
    assert eqx.tree_equal(matrix.with_sharding(matrix.sharding), matrix)
    again = jtu.tree_map(lambda *leaves: jnp.stack(leaves), matrix, matrix)
    expected = NamedSharding(d, P(None, None, "a"))
    assert again.placement.is_equivalent_to(expected, 3)
