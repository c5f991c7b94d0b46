"""Formats whose numbers are chosen together, a tile at a time."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant._solvers import solved
from eqquant.formats import Layout

from ..helpers import decode, encode, normal
from . import oracle


format = eqq.Trellis(2, states=8)
method = eqq.GPTQ()


def numbers(stored, k, format=format):
    return np.asarray(decode(Layout(format).trimmed(stored, k), stored))


def solve(w, h, format=format):
    return numbers(method.solve(w, format, jnp.asarray(h)), w.shape[-1], format)


def tile_by_tile(w, h, found, damping=0.01):
    """What each number should have come near to, given the errors of those after it,
    and what it counts: from the last tile to the first, in float64."""
    h = np.array(h, np.float64) / np.mean(np.diag(h))
    h += np.diag(np.where(np.diag(h) > 0, 0, 1) + damping)
    e, k = np.asarray(w, np.float64) - found, len(h)
    targets, weights = np.zeros_like(e), np.zeros(k)
    for i in range(k):
        # The rest of the row makes up for this number as well as can be.
        before = np.linalg.solve(h[:i, :i], h[:i, i])
        weights[i] = h[i, i] - h[i, :i] @ before
        asked = np.linalg.solve(h[: i + 1, : i + 1], h[: i + 1, i + 1 :])[i]
        targets[:, i] = w[:, i] + e[:, i + 1 :] @ asked
    return targets, weights


# The error of a row is the weighted sum of the squares of what was rounded off: so the
# targets of the definition are those that numbers come near to.
def test_feedback_by_its_definition():
    k, w = 320, np.asarray(normal(8, 320))
    h = oracle.gram(oracle.inputs("correlated", k))
    found = solve(jnp.asarray(w), h)
    targets, weights = tile_by_tile(w, h, found)
    off = np.sum(weights * (targets - found) ** 2, -1)
    mean = np.mean(np.diag(h))
    damped = np.array(h, np.float64) / mean + 0.01 * np.eye(k)
    np.testing.assert_allclose(oracle.error(w, found, damped), off, rtol=1e-4)
    # As near as a trellis of so few states comes to normal numbers: 10.5 dB.
    rate = off / (np.sum(weights) * np.mean(w**2, -1))
    assert np.mean(rate) < 1.15 * 10**-1.05, np.mean(rate)


@pytest.mark.thorough
@pytest.mark.parametrize("bits", (2, 1, 3, 4))
@pytest.mark.parametrize("kind", ("outliers", "correlated"))
def test_errors_of_products_fall(bits, kind):
    format, k = eqq.Trellis(bits, states=8), 512
    if kind == "outliers":
        format = eqq.Rotated(format)
    w, x = normal(16, k, seed=5), oracle.inputs(kind, k, rows=8192)
    seen, new = oracle.gram(x[:4096]), oracle.gram(x[4096:])
    q = solved(w, format, method, seen[None], axis=-1)
    plain = eqq.quantize(w, format, axis=-1)
    ratio = np.sqrt(
        np.sum(oracle.error(w, q, new)) / np.sum(oracle.error(w, plain, new))
    )
    # (Of 256 rows, .705 with one bit.)
    assert ratio <= (0.7 if bits > 1 else 0.71), ratio


# An odd size, and inputs of which less is known than there are.
@pytest.mark.examples(3)
@pytest.mark.parametrize("k", (64, 300, 320))
@pytest.mark.parametrize(
    "kind", ("correlated", "few", "dead", "twice", "none", "shifted")
)
def test_no_row_is_worse_than_rounded_to_nearest(kind, k):
    w, h = normal(8, k, seed=2), oracle.gram(oracle.inputs(kind, k))
    plain = numbers(encode(format, w), k)
    found = solve(w, h)
    assert np.all(np.isfinite(found))
    old, new = (oracle.error(w, q, h) for q in (plain, found))
    assert np.all(new <= old * 1.0001)
    assert np.max(np.abs(found - np.asarray(w))) < 4


def test_rotated():
    w, h = normal(8, 320, seed=1), oracle.gram(oracle.inputs("outliers", 320))
    rotated = eqq.Rotated(format, block=64, seed=3)
    by_hand = method.solve(
        rotated.rotate(w), format, rotated.rotate_gram(jnp.asarray(h), 2)
    )
    stored = method.solve(w, rotated, jnp.asarray(h))
    for name, a in stored.items():
        np.testing.assert_array_equal(a, by_hand[name])


def test_stacks_and_jit():
    w = normal(2, 3, 8, 64)
    h = np.stack([oracle.gram(oracle.inputs("correlated", 64, seed=i)) for i in (0, 1)])
    stored = jax.jit(lambda w, h: method.solve(w, format, h))(w, h[:, None])
    found = numbers(stored, 64)
    for i in range(2):
        for j in range(3):
            one = solve(w[i, j], h[i])
            np.testing.assert_allclose(
                np.sum(oracle.error(w[i, j], found[i, j], h[i])),
                np.sum(oracle.error(w[i, j], one, h[i])),
                rtol=0.05,
            )


# By the native library, where there is one, and by XLA under a trace.
def test_solved():
    w, h = normal(96, 12), oracle.gram(oracle.inputs("correlated", 96))
    q = solved(w, format, method, h[None])
    assert (q.shape, q.axis, q.format) == ((96, 12), -2, format)
    traced = jax.jit(lambda w, h: solved(w, format, method, h).dequantize())(w, h[None])
    closed = jax.jit(lambda: solved(w, format, method, h[None]).dequantize())()
    np.testing.assert_array_equal(closed, q.dequantize())
    new, old = (np.sum(oracle.error(w.T, a.T, h)) for a in (q.dequantize(), traced))
    assert abs(new / old - 1) < 0.05


def test_a_diagonal_asks_for_nothing():
    w, d = normal(8, 64), jnp.asarray(np.linspace(1, 9, 64), jnp.float32)
    found = numbers(method.solve(w, format, d), 64)
    plain = numbers(encode(format, w), 64)
    loss = lambda q: np.sum(np.asarray(d) * (np.asarray(w) - q) ** 2, -1)
    full = np.sum(loss(solve(w, np.diag(d))))
    assert np.all(loss(found) <= loss(plain) * 1.0001)
    assert np.sum(loss(found)) == pytest.approx(full, rel=1e-4)


def test_traced_numbers_that_are_not_finite():
    h = oracle.gram(oracle.inputs("correlated", 96))
    w = normal(4, 96).at[1, 70].set(jnp.nan)
    found = jax.jit(lambda w: solved(w, format, method, h[None], axis=-1).dequantize())
    found = np.asarray(found(w))
    assert np.all(np.isnan(found[1])) and np.all(np.isfinite(found[[0, 2, 3]]))


def test_zeros_and_small_numbers():
    w = normal(8, 64) * np.repeat(np.float32([1, 1e-4, 1e3, 0]), 2)[:, None]
    h = oracle.gram(oracle.inputs("correlated", 64))
    found = solve(w, h)
    np.testing.assert_array_equal(found[6:], 0)
    wide = eqq.Trellis(2, states=8, scale_dtype=jnp.float32)
    new, plain = solve(w, h, wide), numbers(encode(wide, w), 64, wide)
    assert np.all(oracle.error(w, new, h) <= 1.0001 * oracle.error(w, plain, h))


def test_a_tree():
    w = {"a": normal(64, 64), "b": normal(64, 64, seed=1)}
    x = oracle.inputs("correlated", 64).astype(np.float32)
    fn = lambda w, x: jnp.tanh(x @ w["a"]) @ w["b"]
    batches = [jnp.asarray(x[:512]), jnp.asarray(x[512:])]
    for stats in (eqq.calibrate(fn, w, batches), eqq.Sequential(fn, batches)):
        q = eqq.tree_quantize(w, eqq.Rotated(format), stats=stats)
        plain = eqq.tree_quantize(w, eqq.Rotated(format))
        error = lambda q: float(jnp.sum((fn(q, x) - fn(w, x)) ** 2))
        assert error(q) < 0.7 * error(plain)


# What a method that searches for scales of blocks cannot do.
def test_other_methods_are_refused():
    w = normal(4, 64)
    for other in (eqq.ScaleSearch(), eqq.HQQ(), eqq.AWQ()):
        with pytest.raises(ValueError, match="pass `method=None` for that format"):
            other.solve(w, format, jnp.eye(64))


# A weight whose inputs are not known is rounded to nearest.
def test_without_a_gram():
    w = {"a": normal(64, 32), "b": normal(32, 48, seed=1)}
    x = jnp.asarray(oracle.inputs("correlated", 64).astype(np.float32))
    stats = eqq.calibrate(lambda w, x: x @ w["a"], w, [x])
    with pytest.warns(UserWarning, match="entered no product"):
        q = eqq.tree_quantize(w, format, stats=stats)
    plain = eqq.quantize(w["b"], format)
    np.testing.assert_array_equal(q["b"].dequantize(), plain.dequantize())
