import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import error, formats, normal


# What only a GPU can tell. With `EQQUANT_TESTS=cuda`, the tests run on one.


def weight(k, n, format, activation=None, seed=0):
    """`W[k, n]`, stored as in a layer: the contracted axis last."""
    w = normal(n, k, seed=seed)
    q = eqq.quantize(w, format, axis=-1, activation=activation)
    return eqq.tree_prepack(q, platform="gpu").mT


kernels = {
    "nf4": eqq.NF4(64),
    "nf4-32-bfloat16": eqq.NF4(32, scale_dtype=jnp.bfloat16),
    "nf4-512": eqq.NF4(512),
    "int4": eqq.Int4(64),
    "int4-affine": eqq.Int4(128, symmetric=False),
    "int4-affine-channel": eqq.Int4(None, symmetric=False),
    "int8": eqq.Int8(),
    "int8-32": eqq.Int8(32, scale_dtype=jnp.float16),
    "ternary": eqq.Ternary(),
    "ternary-tensor": eqq.Ternary(scale="tensor"),
    "ternary-128": eqq.Ternary(128),
}


def check(x, q, name=None):
    explained = eqq.explain(x, q)
    assert name is None or explained.kernel == name
    y = jax.jit(lambda x, q: x @ q)(x, q)
    assert y.dtype == x.dtype
    bound = explained.error + float(jnp.finfo(x.dtype).eps)
    if q.activation is not None:
        x = eqq.quantize(x.astype(jnp.float32), q.activation, axis=-1).dequantize()
    assert error(y, np.asarray(x, np.float64), q.dequantize()) < bound


# Channels that fill no tile, and what one warpgroup stores; rows that fill a tile, and
# that do not.
@pytest.mark.parametrize(
    "m, k, n, dtype",
    (
        (1, 4096, 1024, jnp.bfloat16),
        (1, 1024, 263, jnp.float32),
        (2, 512, 64, jnp.float32),
        (9, 1024, 263, jnp.float16),
        (16, 4096, 1024, jnp.bfloat16),
        (33, 1024, 263, jnp.bfloat16),
        (70, 4096, 1024, jnp.float32),
        (130, 1024, 263, jnp.bfloat16),
        (300, 1024, 8200, jnp.bfloat16),
        (1000, 1024, 264, jnp.float16),
    ),
)
@pytest.mark.parametrize("name", list(kernels))
def test_hopper(name, m, k, n, dtype):
    x = jnp.asarray(normal(m, k, seed=1), dtype)
    check(x, weight(k, n, kernels[name]), "bfloat16_wgmma")


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float32), ids=str)
@pytest.mark.parametrize("m", (1, 8, 16, 64, 100, 256, 1000))
@pytest.mark.parametrize("k, n", ((70, 5), (224, 197), (512, 128), (4096, 4096)))
def test_integers(m, k, n, dtype):
    x = jnp.asarray(normal(m, k, seed=1), dtype)
    q = weight(k, n, eqq.Int8(), eqq.Int8())
    check(x, q, "int8_wgmma" if m <= 256 and k != 70 else "int8_dot")


@pytest.mark.parametrize("k", (64, 70, 71, 513))
def test_stacks_of_integers(k):
    q = eqq.quantize(normal(3, k, 40), "int8", activation="int8")
    x = normal(3, 7, k, seed=1)
    y = jax.jit(jax.vmap(lambda x, q: x @ q))(x, q)
    for i in range(3):
        rounded = eqq.quantize(x[i], "int8", axis=-1).dequantize()
        assert error(y[i], rounded, q[i].dequantize()) < 1e-5


@pytest.mark.parametrize("k", (64, 320, 832, 1088, 11008))
@pytest.mark.parametrize("name", list(kernels))
def test_contracted_axes(name, k):
    x = jnp.asarray(normal(5, k, seed=1), jnp.bfloat16)
    check(x, weight(k, 136, kernels[name]))


@pytest.mark.parametrize("name", list(formats))
@pytest.mark.parametrize(
    "m, dtype", ((1, jnp.bfloat16), (17, jnp.float32), (100, jnp.bfloat16))
)
def test_every_format(name, m, dtype):
    q = weight(1024, 136, formats[name])
    check(jnp.asarray(normal(m, 1024, seed=1), dtype), q)
    check(jnp.asarray(normal(m, 136, seed=1), dtype), q.mT)


# As `quantize` lays them.
@pytest.mark.parametrize("name", list(formats))
def test_contracted_axis_first(name):
    q = eqq.quantize(normal(256, 136), formats[name])
    check(jnp.asarray(normal(5, 256, seed=1), jnp.bfloat16), q)


@pytest.mark.parametrize("name", list(formats))
def test_the_same_as_on_a_cpu(name):
    w, cpu = np.asarray(normal(256, 72)), jax.devices("cpu")[0]
    q = eqq.quantize(w, formats[name])
    found = np.asarray(q.dequantize())
    with jax.default_device(cpu):
        moved = jax.device_put(q, cpu)
        np.testing.assert_array_equal(found, moved.dequantize())
        expected = np.asarray(eqq.quantize(w, formats[name]).dequantize())
    # Division is rounded otherwise there, and so are numbers between two codes.
    assert np.linalg.norm(found - w) < 1.002 * np.linalg.norm(expected - w)


@pytest.mark.parametrize("name", ("nf4", "int8", "int4-affine"))
def test_derivatives(name):
    q, x = weight(1024, 264, kernels[name]), normal(3, 1024, seed=1)
    w = q.dequantize()
    loss = lambda x, w: jnp.sum((x @ w) ** 2)
    dx = jax.jit(jax.grad(loss))(x, q)
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.grad(loss))(x, w)
    assert jnp.linalg.norm(dx - expected) < 2e-2 * jnp.linalg.norm(expected)


def test_stacks():
    w, x = normal(3, 264, 1024), normal(3, 5, 1024, seed=1)
    q = eqq.tree_prepack(eqq.quantize(w, eqq.NF4(64), axis=-1), platform="gpu")
    y = jax.jit(jax.vmap(lambda x, q: x @ q.mT))(x, q)
    z = jax.jit(lambda x, q: x @ q.mT)(x, q)
    scanned = jax.jit(
        lambda x, q: jax.lax.scan(lambda c, xq: (c, xq[0] @ xq[1].mT), 0, (x, q))[1]
    )(x, q)
    w = q.mT.dequantize()
    for i in range(3):
        for found in (y, z, scanned):
            assert error(found[i], x[i], w[i]) < 8e-3


# A row does not depend on the others, nor a run on the one before.
@pytest.mark.parametrize("name", ("nf4", "int8", "int4-affine"))
def test_runs_agree(name):
    q, x = weight(4096, 1024, kernels[name]), normal(16, 4096, seed=1)
    product = jax.jit(lambda x, q: x @ q)
    first = np.asarray(product(x, q))
    for _ in range(50):
        np.testing.assert_array_equal(product(x, q), first)
    z = np.asarray(product(x.at[1, 7].set(jnp.nan), q))
    others = np.arange(16) != 1
    np.testing.assert_array_equal(z[others], first[others])
    assert np.all(np.isnan(z[1]))
