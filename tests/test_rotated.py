"""Products with rotated weights, beyond the laws that hold for every format."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import Layout
from eqquant.kernels._table import supporting

from .formats.reference import rotation
from .helpers import error, normal


k = 192  # 3 x 64


def rotations(fn, *args):
    """How often a compiled program multiplies with a matrix of 64 x 64."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    assert text is not None
    defined = dict(re.findall(r"(%[\w.-]+) = (\w+\[[\d,]*\])", text))
    dots = re.findall(r" dot\((%[\w.-]+), (%[\w.-]+)\)", text)
    return sum("f32[64,64]" in (defined[a], defined[b]) for a, b in dots)


def attention(x, q, k, v):
    return [x @ w for w in (q, k, v)]


def test_products_share_the_rotation_of_an_input():
    x = normal(5, k)
    same = [eqq.quantize(normal(k, n, seed=n), "rotated") for n in (96, 32, 32)]
    assert rotations(attention, x, *same) == 1
    formats = [eqq.Rotated(f) for f in (eqq.Int4(), eqq.Int8(), eqq.formats.Q6_K())]
    mixed = [eqq.quantize(normal(k, 32), f) for f in formats]
    assert rotations(attention, x, *mixed) == 1
    # Other signs are another rotation.
    other = [eqq.quantize(normal(k, 32), eqq.Rotated(seed=i)) for i in range(3)]
    assert rotations(attention, x, *other) == 3


# As in a model: layers are scanned over, and each is mapped over positions.
def test_so_do_layers():
    def layer(key):
        keys = jr.split(key, 3)
        return [eqx.nn.Linear(k, k, use_bias=False, key=key) for key in keys]

    layers = eqx.filter_vmap(layer)(jr.split(jr.key(0), 2))
    layers = eqq.tree_quantize(layers, eqq.Rotated(eqq.Int8()))

    def model(x, layers):
        def step(x, layer):
            return sum(jax.vmap(linear)(x) for linear in layer), None

        return jax.lax.scan(step, x, layers)[0]

    x = normal(5, k)
    assert rotations(model, x, layers) == 1
    dense = eqq.tree_dequantize(layers)
    np.testing.assert_allclose(model(x, layers), model(x, dense), rtol=1e-4, atol=1e-4)


# A product across, and so a derivative, rotates its result back: one small product.
def test_across():
    q = eqq.quantize(normal(k, 32), "rotated")
    x = normal(5, 32)
    assert rotations(lambda x, q: x @ q.T, x, q) == 1
    assert error(x @ q.T, x, q.dequantize().T) < 1e-5
    loss = lambda x, q: jnp.sum(jnp.sin(x @ q))
    assert rotations(jax.grad(loss), normal(5, k), q) == 2


# Inputs are rotated in float32: these would be infinite.
@pytest.mark.parametrize("dtype", (jnp.float16, jnp.bfloat16))
def test_narrow_inputs(dtype):
    format = eqq.Rotated(eqq.Int8(), 64)
    q = eqq.quantize(normal(k, 8) / 4096, format)
    x = jnp.asarray(6e4 * np.sign(rotation(k, format))[:8].T, dtype).T
    y = x @ q
    assert y.dtype == dtype
    off = error(y.astype(jnp.float32), x.astype(jnp.float32), q.dequantize())
    assert off < jnp.finfo(dtype).eps


def test_dtypes_of_kernels():
    q = eqq.quantize(normal(k, 8), "rotated")
    kernels = {"bfloat16": "bfloat16", "float16": "float32", "float32": "float32"}
    for dtype, expected in kernels.items():
        for x, w in (((2, k), q), ((2, 8), q.T)):
            x = jax.ShapeDtypeStruct(x, dtype)
            problem = eqq.explain(x, w).problem
            assert problem is not None and problem.dtype == expected
            with jax.default_matmul_precision("highest"):
                problem = eqq.explain(x, w).problem
            assert problem is not None and problem.dtype == jnp.float32


def test_multiples():
    q = eqq.quantize(normal(k, 8), eqq.Rotated(eqq.Int8()))
    found = eqq.implicit(lambda w: w * 2.0)(q)
    assert eqq.is_quantized(found)
    np.testing.assert_array_equal(found.dequantize(), 2 * q.dequantize())


def decibels(y, exact):
    off = np.sum((np.asarray(y, np.float64) - exact) ** 2)
    return 10 * np.log10(np.sum(exact**2) / off)


# Of products with inputs of which 8 channels of 4096 are 30 times as large as others:
# decibels for inputs in float32 and in 8 bits, and the same with rotated weights. (The
# figures are those of notebooks/formats.md.)
@pytest.mark.thorough
def test_outlier_channels():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((4096, 512), np.float32)
    x = rng.standard_normal((256, 4096), np.float32)
    x[:, rng.choice(4096, 8, replace=False)] *= 30
    exact = x.astype(np.float64) @ w

    def noise(format, activation):
        q = eqq.quantize(w, format, activation=activation)
        return decibels(x @ q, exact)

    known = (
        (eqq.Int8(), (41.3, 22.3, 41.4, 37.0)),
        (eqq.Int4(), (19.5, 17.7, 19.5, 19.4)),
    )
    for inner, expected in known:
        formats = (inner, eqq.Rotated(inner))
        found = [noise(f, a) for f in formats for a in (None, "int8")]
        np.testing.assert_allclose(found, expected, rtol=0, atol=0.15)


# A method rounds the rotated matrix, of rotated inputs.
@pytest.mark.examples(2)
@pytest.mark.parametrize("method", (eqq.GPTQ(), eqq.ScaleSearch()), ids=str)
@pytest.mark.parametrize("diagonal", (False, True))
def test_methods(method, diagonal):
    format, w = eqq.Rotated(eqq.Int(3, 32), 32), np.asarray(normal(8, 96))
    r = rotation(96, format)
    gram = np.diag(np.linspace(1, 9, 96)) + (0 if diagonal else 1)
    turned = r.T @ gram @ r
    if diagonal:
        turned = np.diag(np.diagonal(turned))

    def loss(w, format, gram):
        given = np.diagonal(gram) if diagonal else gram
        stored = method.solve(jnp.asarray(w, jnp.float32), format, as_float(given))
        error = Layout(format).decode(stored) - w
        return np.einsum("nk,kl,nl", error, gram, error)

    as_float = lambda a: jnp.asarray(a, jnp.float32)
    found, expected = loss(w, format, gram), loss(w @ r, format.format, turned)
    # (A number half-way between two may be rounded otherwise.)
    assert abs(found / expected - 1) < 0.02


@pytest.mark.thorough
def test_a_calibrated_model_loses_less():
    model = eqx.nn.MLP(96, 96, 96, 1, key=jr.key(0))
    scale = jnp.exp(jnp.linspace(-2, 2, 96))[None]
    x, new = normal(512, 96) * scale, normal(512, 96, seed=1) * scale
    fn = eqx.filter_jit(lambda model, x: jax.vmap(model)(x))
    stats = eqq.calibrate(fn, model, [x])
    exact = np.asarray(fn(model, new), np.float64)

    def noise(stats):
        format = eqq.Rotated(eqq.Int(3, 32))
        return decibels(fn(eqq.tree_quantize(model, format, stats=stats), new), exact)

    assert noise(stats) > noise(None) + 2


# Errors are relative to the rotated operands, by each kernel there is: also of inputs
# and weights whose rotation cancels, and in a dtype that rotated inputs are rounded to.
@pytest.mark.parametrize("dtype", (jnp.float32, jnp.bfloat16))
@pytest.mark.parametrize("kind", ("one-hot", "outliers", "constant"))
def test_errors(kind, dtype):
    format = eqq.Rotated(eqq.Int4(32), 64)
    x, w = np.array(normal(4, k)), np.array(normal(k, 24, seed=1))
    if kind == "one-hot":
        x = np.eye(k)[[0, 1, 70, 191]]
    elif kind == "outliers":
        x[:, 5], w[9] = 1e4, 1e3
    else:
        x, w = np.ones_like(x), np.ones_like(w)
    q, x = eqq.quantize(jnp.asarray(w, jnp.float32), format), jnp.asarray(x, dtype)
    r, stored = rotation(k, format), q.layout.to_rows(q.stored)
    turned = np.asarray(format.format.decode(stored, q.layout.tail), np.float64).T
    problem = eqq.explain(x, q).problem
    assert problem is not None
    for kernel in supporting(problem):
        y = eqq.qmatmul(x, q, kernel=kernel.name).astype(jnp.float32)
        bound = kernel.bound(problem) + 2 * float(jnp.finfo(dtype).eps)
        off = error(y, np.asarray(x.astype(jnp.float32), np.float64) @ r, turned)
        assert off < bound, kernel.name
    highest = eqq.qmatmul(x, q, precision="highest").astype(jnp.float32)
    exact = np.asarray(x.astype(jnp.float32), np.float64) @ r @ turned
    size = np.abs(np.asarray(x.astype(jnp.float32)) @ r) @ np.abs(turned)
    rounding = 0.51 * float(jnp.finfo(dtype).eps) * np.abs(exact)
    assert np.all(np.abs(np.asarray(highest) - exact) <= 1e-5 * size + rounding)
