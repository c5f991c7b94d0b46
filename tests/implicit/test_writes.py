"""Writes into an array that is `writable` keep it packed, and store what `quantize`
gives for the numbers that are written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant.formats import Q4_0

from ..helpers import normal


formats = [eqq.Int8(), eqq.Int4(16), eqq.NF4(16), eqq.MXFP4(), Q4_0()]


def same(found, wanted):
    assert isinstance(found, eqq.QuantizedArray) and found.writable
    np.testing.assert_array_equal(found.dequantize(), wanted)


@pytest.fixture(autouse=True)
def never_dense(monkeypatch):
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "raise")


# The axis of blocks is last, first or between; what is written lies before or after it.
@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "shape, axis, tokens",
    [((5, 3, 32), -1, 0), ((5, 32, 3), -2, 0), ((32, 5, 3), -3, 1), ((5, 32), -1, 0)],
)
@pytest.mark.parametrize("format", formats, ids=str)
def test_writes(format, shape, axis, tokens):
    to_format = lambda a, axis: eqq.quantize(a, format, axis=axis)
    before = normal(*shape)
    new = normal(*(2 if i == tokens else n for i, n in enumerate(shape)), seed=1)
    cache = eqq.quantize(before, format, axis=axis, writable=True)
    dense, rounded = cache.dequantize(), to_format(new, axis).dequantize()
    at = (slice(None),) * tokens

    def slices(cache, new, start):
        return lax.dynamic_update_slice_in_dim(cache, new, start, tokens)

    def indices(cache, new, start):
        return cache.at[(*at, jnp.array([3, 1]) + start)].set(new)

    def one(cache, new, start):
        return cache.at[(*at, start)].set(jnp.take(new, 1, tokens, mode="clip"))

    def appended(cache, new, start):
        return jnp.concatenate([cache, new], tokens)

    for fn in (slices, indices, one, appended):
        for start in (jnp.int32(0), jnp.int32(2), jnp.int32(-1)):
            wanted = jax.jit(fn)(dense, rounded, start)
            same(eqq.implicit(fn)(cache, new, start), wanted)
    wanted = jax.jit(slices)(dense, rounded, 2)
    same(jax.jit(eqq.implicit(slices))(cache, new, 2), wanted)

    # Each of a batch at a place of its own.
    starts = jnp.array([1, 2], jnp.int32)
    caches = eqq.quantize(
        jnp.stack([before, -before]), format, axis=axis, writable=True
    )
    news = jnp.stack([new, 3 * new])
    wanted = jax.jit(jax.vmap(slices))(
        caches.dequantize(), to_format(news, axis).dequantize(), starts
    )
    same(eqq.implicit(jax.vmap(slices))(caches, news, starts), wanted)
    same(jax.vmap(eqq.implicit(slices))(caches, news, starts), wanted)


# A write that computes what it writes from what was there gets these numbers. No other
# parameter of a scatter is one that it forgets.
def test_computed_writes(monkeypatch):
    monkeypatch.setenv("EQQUANT_ON_DEQUANTIZE", "allow")
    cache = eqq.quantize(normal(2, 6, 32), "int8", axis=-1, writable=True)
    new = normal(2, 32, seed=1)
    fns = (
        lambda c, new: c.at[:, 3].apply(jnp.tanh),
        lambda c, new: c.at[:, [1, 1]].apply(jnp.tanh),
        lambda c, new: jax.vmap(lambda c: c.at[3].apply(jnp.tanh))(c),
        lambda c, new: c.at[:, 3].add(new),
        lambda c, new: c.at[:, 3].multiply(new, mode="clip"),
        lambda c, new: c.at[:, 3].max(new, unique_indices=True),
    )
    every = lambda c, new: [fn(c, new) for fn in fns]
    found = jax.jit(eqq.implicit(every))(cache, new)
    wanted = jax.jit(every)(cache.dequantize(), new)
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(eqq.tree_dequantize(a), b, rtol=1e-6, atol=1e-6)


# An index beyond the end is dropped or clipped, as it would be.
@pytest.mark.parametrize("mode", ("drop", "clip"))
def test_beyond_the_end(mode):
    cache = eqq.quantize(normal(6, 32), "int8", axis=-1, writable=True)
    new = normal(32, seed=1)
    fn = lambda cache, new: cache.at[jnp.array([9, 1])].set(new, mode=mode)
    rounded = eqq.quantize(new, "int8").dequantize()
    same(eqq.implicit(fn)(cache, new), fn(cache.dequantize(), rounded))


def attend(cache, x, i):
    """One step: the token `x` is written to the place `i`, and looks at all before."""
    keys, values = cache
    keys = lax.dynamic_update_slice_in_dim(keys, x[None], i, 0)
    values = values.at[i].set(jnp.tanh(x))
    scores = jnp.einsum("hd,khd->hk", x, jnp.repeat(keys, 1, axis=1))
    scores = jnp.where(jnp.arange(keys.shape[0]) <= i, scores, -jnp.inf)
    weights = jax.nn.softmax(scores / x.shape[-1] ** 0.5)
    return (keys, values), jnp.einsum("hk,khd->hd", weights, values)


def decode(cache, xs):
    def step(state, x):
        cache, i = state
        cache, y = attend(cache, x, i)
        return (cache, i + 1), y

    (cache, _), ys = lax.scan(step, (cache, jnp.int32(0)), xs)
    return cache, ys


def test_cache_of_keys_and_values():
    xs = normal(12, 2, 64)
    empty = jnp.zeros((16, 2, 64))
    to_cache = lambda a: eqq.quantize(a, "int8", axis=-1, writable=True)
    cache, ys = jax.jit(eqq.implicit(decode))((to_cache(empty),) * 2, xs)
    keys, values = cache
    same(keys, eqq.quantize(empty.at[:12].set(xs), "int8", axis=-1).dequantize())
    assert isinstance(values, eqq.QuantizedArray)
    _, wanted = decode((empty, empty), xs)
    assert jnp.linalg.norm(ys - wanted) < 0.01 * jnp.linalg.norm(wanted)


# Also where what is computed from it is computed again for a derivative.
def test_within_a_checkpoint():
    new, empty = normal(2, 64), jnp.zeros((8, 2, 64))
    cache = (eqq.quantize(empty, "int8", axis=-1, writable=True),) * 2

    def loss(step):
        def fn(x, cache):
            cache, y = step(cache, x, jnp.int32(1))
            cache, y = step(cache, jnp.tanh(y), jnp.int32(2))
            return jnp.sum(y**2), cache

        return fn

    again = jax.checkpoint(attend)
    for transform in (lambda fn: fn, lambda fn: jax.grad(fn, has_aux=True)):
        found, (keys, values) = eqq.implicit(transform(loss(again)))(new, cache)
        wanted, (a, b) = eqq.implicit(transform(loss(attend)))(new, cache)
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)
        same(keys, a.dequantize())
        same(values, b.dequantize())


# A cache that is donated is written where it is.
@pytest.mark.optimized
def test_in_place():
    to_cache = lambda a: eqq.quantize(a, "int4", axis=-1, writable=True)
    cache = (to_cache(jnp.zeros((256, 2, 64))),) * 2
    step = jax.jit(eqq.implicit(attend), donate_argnums=0)
    memory = step.lower(cache, normal(2, 64), 3).compile().memory_analysis()
    assert memory.alias_size_in_bytes == sum(q.nbytes for q in cache)


def write(cache, new):
    return cache.at[1].set(new)


# Only what is asked to round does; blocks are written as a whole, or not at all; and
# where rows share a scale, no row can change alone.
def test_what_becomes_dense(monkeypatch):
    w, new = normal(8, 32), normal(32, seed=1)
    shared, fine = eqq.NVFP4(), eqq.Int8(16)
    q = eqq.quantize(w, "int8", axis=-1)
    cache = eqq.quantize(w, "int8", axis=-1, writable=True)
    by_column = eqq.quantize(normal(16, 32), eqq.Int8(16), axis=-2, writable=True)
    part = lambda cache, new: cache.at[:, :4].set(new[:4])
    half = lambda cache, new: lax.dynamic_update_slice(cache, new[None, 16:], (1, 16))
    cases = [
        (write, q, "scatter"),
        (write, by_column, "scatter"),
        (part, cache, "scatter"),
        (half, eqq.quantize(w, fine, axis=-1, writable=True), "dynamic_update_slice"),
        (write, eqq.quantize(w, shared, axis=-1, writable=True), "scatter"),
    ]
    for fn, q, name in cases:
        with pytest.raises(RuntimeError, match=name):
            eqq.implicit(fn)(q, new)
        with monkeypatch.context() as patch:
            patch.setenv("EQQUANT_ON_DEQUANTIZE", "allow")
            found = eqq.implicit(fn)(q, new)
            np.testing.assert_array_equal(found, fn(q.dequantize(), new))


def test_numbers_that_are_not_finite():
    cache = eqq.quantize(normal(8, 32), "int8", axis=-1, writable=True)
    found = eqq.implicit(write)(cache, normal(32).at[3].set(jnp.nan)).dequantize()
    assert np.all(np.isnan(found[1])) and np.all(np.isfinite(np.delete(found, 1, 0)))


def test_stays_writable(tmp_path):
    cache = eqq.quantize(normal(8, 32), "int8", axis=-1, writable=True)
    assert "writable" in repr(cache)
    eqq.save(tmp_path / "cache.safetensors", cache)
    loaded = eqq.load(tmp_path / "cache.safetensors")
    same(
        eqq.implicit(write)(loaded, normal(32)),
        eqq.implicit(write)(cache, normal(32)).dequantize(),
    )
    exported = jax.export.export(jax.jit(lambda q: q))(cache)
    again = jax.export.deserialize(exported.serialize())
    assert again.call(cache).writable
