import functools as ft

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq

from .helpers import error, formats, native_formats, normal


close = ft.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4)


def assert_tree_close(a, b):
    jtu.tree_map(close, a, b)


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


@pytest.mark.examples(2)
@native_formats
def test_first_derivatives(format):
    q = eqq.quantize(normal(70, 5), format)
    x, v = 0.1 * normal(2, 70, seed=1), normal(2, 70, seed=2)
    expected = first_derivatives(q.dequantize(), x, v)
    assert_tree_close(first_derivatives(q, x, v), expected)


@pytest.mark.examples(1)
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
        gradient = jax.jit(jax.grad(loss))
        close(gradient(x, q), gradient(x, q.dequantize()))
    hessian = jax.jit(jax.hessian(loss))
    close(hessian(x, q), hessian(x, q.dequantize()))


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


@pytest.mark.examples(1)
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


@pytest.mark.examples(3)
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
    assert not np.any(dy)
