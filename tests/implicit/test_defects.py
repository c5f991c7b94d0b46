import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant import implicit

from ..helpers import error, formats, normal
from .same import assert_close, assert_same, assert_same_gradient


# What other libraries that interpret functions of quantized arrays are known to get
# wrong. Each test says what.


def quantized(*shape, name="nf4", axis=None, seed=0):
    return eqq.quantize(normal(*shape, seed=seed), formats[name], axis=axis)


# Integer products that take any `dot_general` for `x @ w`.
@pytest.mark.parametrize("n", (64, 48))
def test_dimension_numbers_are_heeded(n):
    x = normal(5, 64, seed=1)
    fn = lambda x, w: jnp.einsum("bk,nk->bn", x, w)
    y = assert_same(fn, x, quantized(n, 64, name="int8"), packed=True, read=1)
    assert y.dtype == jnp.float32
    experts = lambda x, w: jnp.einsum("tk,ekn->ten", x, w)
    q = quantized(8, 64, 64, name="int8")
    y = assert_same(experts, x[:4], q, packed=True, read=1)
    assert y.shape == (4, 8, 64)


# Scales along the wrong axis by default: of each input, not of each output.
def test_scales_are_of_output_channels():
    w = normal(64, 48) * jnp.exp2(jnp.arange(48.0))[None]
    q = eqq.quantize(w, "int8")
    assert q.scale.shape == (48, 1)
    assert error(implicit(jnp.matmul)(normal(3, 64), q), normal(3, 64), w) < 4e-3


# A shape that is kept beside, and goes stale.
def test_stacks():
    make = jax.vmap(lambda w: eqq.quantize(w))
    q = make(normal(3, 64, 64))
    x = normal(5, 64, seed=1)
    assert q.shape == (3, 64, 64)
    fn = lambda x, w: lax.scan(lambda x, w: (0.1 * (x @ w), None), x, w)[0]
    assert_same(fn, x, q, packed=True, read=1)
    first = jax.tree.map(lambda a: a[0], q)
    assert_same(lambda x, w: jnp.einsum("bk,kn->bn", x, w), x, first, packed=True)
    mapped = jax.vmap(implicit(lambda w: x @ w))(q)
    assert_close(mapped, x @ q.dequantize())


# Codes without a scale, and one threshold for all rows.
@pytest.mark.parametrize("name", ("binary", "ternary"))
def test_scales_of_one_bit_and_two(name):
    w = 0.02 * normal(64, 256)
    w = w.at[0].multiply(50)
    q = eqq.quantize(w, formats[name], axis=-1)
    relative = jnp.linalg.norm(q.dequantize() - w, axis=1) / jnp.linalg.norm(w, axis=1)
    assert jnp.max(relative) < 0.75
    assert_same(lambda x, w: jnp.einsum("bk,nk->bn", x, w), normal(3, 256), q, read=1)


# Floats that become integers on the way, no derivative, and no batches.
@pytest.mark.examples(1)
@pytest.mark.parametrize("format", (eqq.RSRBinary(), eqq.RSRTernary()))
def test_segments(format):
    numbers = np.random.default_rng(0).integers(format.domain[0], 2, (48, 40))
    q = eqq.quantize(jnp.asarray(numbers, jnp.float32), format)
    x = 0.1 * normal(5, 48)
    for rows in (x, x[0], x[None]):
        assert_same(lambda x, w: x @ w, rows, q, packed=True, read=1)
    assert_same_gradient(lambda x, w: x @ w, x, q)
    assert_same(lambda w: (w.T, w[:, :7]), q, packed="result")
    assert_same(lambda w: (-w, w * 2.0), q)
    exact = implicit(lambda v, w: v @ w)(jnp.asarray([0.5, 0.75] * 24), q)
    assert_close(exact, np.asarray([0.5, 0.75] * 24, np.float32) @ q.dequantize())


# A code book that is a polynomial: zeros and the largest numbers are not kept.
def test_code_book():
    w = normal(64, 48).at[3].set(0.0)
    q = eqq.quantize(w, "nf4")
    assert not np.any(implicit(lambda w: w[3] + 0.0)(q))
    largest = implicit(lambda w: jnp.max(jnp.abs(w), axis=0))(q)
    assert_close(largest, jnp.max(jnp.abs(w), axis=0), 1e-6)


# Shapes that change by being used, and transposes that lose.
@pytest.mark.examples(1)
@pytest.mark.parametrize("name", ("nf4", "int8", "ternary", "binary"))
def test_shapes(name):
    q = quantized(3, 10, 36, name=name)
    every = lambda w: (
        w.swapaxes(1, 2).swapaxes(1, 2),
        w.transpose(1, 0, 2).reshape(30, 36),
        w.reshape(3, 10, 6, 6),
        jnp.broadcast_to(w[:, None], (3, 2, 10, 36)),
        # An axis within the contracted one.
        lax.broadcast_in_dim(w.reshape(3, 2, 1, 5, 36), (3, 2, 4, 5, 36), range(5)),
    )
    twice, *_ = assert_same(every, q, tolerance=1e-6)
    assert jax.tree.all(jax.tree.map(jnp.array_equal, twice, q))
    odd = quantized(10, 7, name=name)
    assert_same(lambda x, w: x @ w.T, normal(4, 7), odd, packed=True, read=1)


# Memory: the whole array on the way, and for each layer in the backward pass.
@pytest.mark.optimized
@pytest.mark.parametrize("axes", ("io", "oi"))
def test_temporaries(axes):
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    axis = axes.index("i") - 2
    q = jax.eval_shape(lambda w: eqq.quantize(w, "nf4", axis=axis), w)
    x = jax.ShapeDtypeStruct((8, 1024), jnp.float32)

    def loss(x, w):
        for _ in range(3):
            x = jnp.tanh(jnp.einsum(f"bi,{axes}->bo", x, w))
        return jnp.sum(x)

    for fn in (implicit(loss), jax.grad(implicit(loss)), implicit(jax.grad(loss))):
        compiled = jax.jit(fn).lower(x, q).compile()
        assert compiled.memory_analysis().temp_size_in_bytes <= 0.3 * 4 * 1024**2


# Casts that change the array of the caller.
def test_nothing_is_mutated():
    q = quantized(64, 48)
    before = jax.tree.map(np.asarray, q)
    cast = implicit(lambda w: w.astype(jnp.bfloat16))(q)
    assert cast.dtype == jnp.bfloat16 and q.dtype == jnp.float32
    implicit(lambda w: (2.0 * w, w.T, jnp.exp(w)))(q)
    assert jax.tree.all(jax.tree.map(np.array_equal, before, q))


# Members that arrays have: a function that uses any of them gets an array.
def test_members():
    q = quantized(64, 48)
    fn = lambda w: (w.at[0, 1].add(w.size), w[0], w == w, w.ndim * w, abs(w), [*w][3])
    assert_same(fn, q)
    assert_same(lambda x, w: x @ w, normal(3, 64), q, packed=True)


# Formats that do not mix, and branches and loops that do not take them.
def test_formats_mix():
    names = ("nf4", "int8", "binary", "ternary")
    qs = [quantized(48, 48, name=name, seed=i) for i, name in enumerate(names)]

    def fn(flag, a, b, c, d):
        y = a @ b + b @ c + c + d @ a
        y = y + lax.cond(flag, lambda: a @ b, lambda: c + d)
        return lax.while_loop(
            lambda s: jnp.sum(s[0] ** 2) < 1e8, lambda s: (s[0] @ s[1], s[1]), (y, b)
        )[0]

    for flag in (True, False):
        assert_same(fn, jnp.asarray(flag), *qs)


# The signs of -.1 and .1 were those of their floor: -1 and 0.
def test_straight_through_is_not_a_floor():
    w = jnp.array([[-0.9, -0.1, 0.1, 0.9]])
    binary = eqq.straight_through(w, "binary", axis=-1)
    assert jnp.allclose(binary, jnp.array([[-0.5, -0.5, 0.5, 0.5]]))
    ternary = eqq.straight_through(w, "ternary", axis=-1)
    assert jnp.allclose(ternary, jnp.array([[-0.5, 0.0, 0.0, 0.5]]))
