import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import eqquant as eqq
from eqquant.train import (
    quantized_all_gather,
    quantized_pmean,
    quantized_psum,
    quantized_psum_scatter,
)

from ..helpers import normal
from ..raises import raises
from ..sharding.meshes import collectives, mesh, put


# An array for each of eight devices.
each = normal(8, 40, 33) * np.exp(normal(8, 1, 33, seed=1))
small = normal(8, 5)


def by_device(fn, kind, out_specs, in_specs=P("a")):
    """Of a function of the array of one device."""
    m = mesh(kind, 8)
    one = lambda *xs: fn(*jax.tree.map(lambda x: x[0], xs))
    every = jax.shard_map(one, mesh=m, in_specs=in_specs, out_specs=out_specs)
    return jax.jit(every), lambda x: put(x, m, "a")


def rounded(x, format, axis=-1):
    return np.asarray(eqq.quantize(jnp.asarray(x), format, axis=axis).dequantize())


def twice(each, format):
    """Of parts of whole blocks: the sum of what devices round, rounded."""
    flat = each.reshape(8, -1)
    size = -(-flat.shape[1] // 8 // 32) * 32
    parts = np.pad(flat, ((0, 0), (0, 8 * size - flat.shape[1]))).reshape(8, 8, size)
    once = np.sum(rounded(parts, format).astype(np.float64), axis=0)
    again = rounded(np.float32(once), format).reshape(-1)
    return again[: flat.shape[1]].reshape(each.shape[1:])


# On meshes of both kinds, in a jitted program that sends 8-bit numbers.
@pytest.mark.parametrize("kind", ["auto", "explicit"])
def test_psum(kind):
    format = eqq.Int8(32)

    def total(x, s):
        y = quantized_psum({"x": x, "s": s, "n": jnp.int32(2)}, "a", format)
        return y, quantized_pmean(x, "a", format)

    fn, place = by_device(total, kind, P())
    found, mean = fn(place(each), place(small))
    np.testing.assert_allclose(found["x"], twice(each, format), rtol=0, atol=1e-2)
    off = np.abs(found["x"] - np.sum(each, 0))
    assert 0 < off.mean() < 0.02 * np.abs(np.sum(each, 0)).mean()
    np.testing.assert_allclose(found["s"], np.sum(small, 0), rtol=1e-5, atol=1e-6)
    assert found["n"] == 16
    np.testing.assert_allclose(mean, found["x"] / 8, rtol=1e-2, atol=1e-2)


def test_what_is_sent():
    def sent(format):
        fn = lambda x: quantized_psum(x, "a", format)
        fn, place = by_device(fn, "auto", P())
        found = collectives(fn, place(each))
        assert set(found) == {"all-to-all", "all-gather"}
        return " ".join([*found["all-to-all"], *found["all-gather"]])

    # The codes, and a scale for each block.
    assert "s8[" in sent(eqq.Int8(256)) and "f32[" not in sent(eqq.Int8(256))
    assert "u8[" in sent(eqq.FP8("e5m2", 256))
    gathered, place = by_device(
        lambda x: quantized_all_gather(x, "a", "int8"), "auto", P("a")
    )
    found = collectives(gathered, place(each))
    assert set(found) == {"all-gather"} and "s8[" in " ".join(found["all-gather"])
    assert "f32[" not in " ".join(found["all-gather"])


# What a step loses, the next one has: the mean of many steps is exact.
def test_error_feedback():
    format = eqq.Int4(32)

    def means(x):
        def step(error, _):
            y, error = quantized_pmean(x, "a", format, error=error)
            return error, y

        error, ys = lax.scan(step, jnp.zeros_like(x), length=40)
        return ys[0], jnp.mean(ys, 0), jnp.max(jnp.abs(error))[None]

    fn, place = by_device(means, "auto", (P(), P(), P("a")))
    once, mean, error = fn(place(each))
    wanted = np.mean(each, 0)
    assert np.all(error < 3 * np.max(np.abs(each)))
    near, far = (np.linalg.norm(a - wanted) for a in (mean, once))
    assert near < 0.1 * far


# Sharded weights are gathered, and their gradients scattered.
@pytest.mark.parametrize("backward", [None, eqq.Int8(32)])
def test_gather_and_scatter(backward):
    x = normal(8, 4, 48)
    ct = normal(8, 4, 8 * 48, seed=2)

    def fn(x, ct):
        gather = lambda x: quantized_all_gather(
            x, "a", eqq.Int8(32), axis=-1, backward=backward
        )
        y, pull = jax.vjp(gather, x)
        scattered = quantized_psum_scatter(ct, "a", eqq.Int8(32), scatter_dimension=1)
        return y[None], pull(ct)[0][None], scattered[None]

    fn, place = by_device(fn, "auto", P("a"))
    y, dx, scattered = fn(place(x), place(ct))
    flat = rounded(x.reshape(8, -1), eqq.Int8(32)).reshape(x.shape)
    wanted = np.concatenate(list(flat), -1)
    for one in y:
        np.testing.assert_allclose(one, wanted, rtol=1e-6)
    exact = np.sum(ct, 0).reshape(4, 8, 48).swapaxes(0, 1)
    tolerance = 1e-5 if backward is None else 0.1
    np.testing.assert_allclose(dx, exact, atol=tolerance)
    assert 0 < np.max(np.abs(scattered - exact)) < 0.1
    if backward is not None:
        np.testing.assert_allclose(dx, scattered, rtol=1e-6)


def test_derivatives():
    def fn(x):
        loss = lambda x: jnp.sum(jnp.sin(quantized_psum(x, "a", "int8")))
        return jax.grad(loss)(x)[None]

    fn, place = by_device(fn, "auto", P("a"))
    total = np.sum(each, 0)
    np.testing.assert_allclose(fn(place(each))[3], np.cos(total), atol=0.5)


def test_bad_input():
    def call(fn, *args):
        run, place = by_device(fn, "auto", P())
        return run(*map(place, args))

    with raises(ValueError, "format", "RSRBinary"):
        call(lambda x: quantized_psum(x, "a", "rsrbinary"), each)
    with raises(ValueError, "scatter_dimension", "33"):
        call(lambda x: quantized_psum_scatter(x, "a", scatter_dimension=1), each)
    with raises(ValueError, "error", "structure"):
        call(lambda x: quantized_psum([x], "a", error=x), each)
    with raises(ValueError, "error", r"\(3,\)"):
        call(lambda x: quantized_psum(x, "a", error=jnp.zeros(3)), each)
