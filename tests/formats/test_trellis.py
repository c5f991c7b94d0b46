"""Codes of a trellis: against another implementation, in NumPy and float64; and what
error they have."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import decode, encode, normal


def points(format):
    """The number of each state, times the scale: from the definition."""
    hashed = np.arange(2**format.states, dtype=np.uint64) * 0x83DCD12D % 2**32
    return hashed.astype("<u4").view(np.uint8).reshape(-1, 4).sum(-1).astype(int) - 510


def bits_of(words):
    """The stream of bits, from the lowest of the first word on."""
    return (words[..., None] >> np.arange(32, dtype=np.uint32) & 1).reshape(
        *words.shape[:-1], -1
    )


def states_of(codes, format):
    """The states of the codes of one tile, which is a cyclic stream of bits."""
    bits = bits_of(codes)
    start = np.arange(len(bits) // format.bits)[:, None] * format.bits
    where = (start + np.arange(format.states)) % len(bits)
    return bits[where].astype(int) @ 2 ** np.arange(format.states)


def decoded(stored, format, k):
    """By row and tile, from the definition."""
    words, scale = np.asarray(stored["codes"]), np.asarray(stored["scale"])
    scale = scale.view(format.scale_dtype).astype(np.float64)
    size = format.tile * format.bits // 32
    rows = [
        np.concatenate(
            [
                points(format)[states_of(row[i : i + size], format)]
                for i in range(0, len(row), size)
            ]
        )
        for row in words
    ]
    return (np.stack(rows) * scale)[:, :k]


def best_error(x, format):
    """The least sum of squares of differences of the points of closed paths, over all
    states where they may be closed. This is for few states and few numbers."""
    states, groups = 2**format.states, 2 ** (format.states - format.bits)
    value, state, least = points(format), np.arange(2**format.states), np.inf
    for seam in range(groups):
        cost = np.where(state >> format.bits == seam, (x[0] - value) ** 2.0, np.inf)
        for number in x[1:]:
            best = cost.reshape(states // groups, groups).min(0)
            cost = best[state >> format.bits] + (number - value) ** 2
        least = min(least, cost[state % groups == seam].min())
    return least


every = [eqq.Trellis(bits, states=8) for bits in range(1, 9)]
every += [eqq.Trellis(2, states=12), eqq.Trellis(1, states=16)]
every += [eqq.Trellis(3, states=9, scale_dtype=jnp.float32)]


@pytest.mark.examples(4)
@pytest.mark.parametrize("k", (300, 64))
@pytest.mark.parametrize("format", every[::-1], ids=str)
def test_decode(format, k):
    rng = np.random.default_rng(0)
    size = -(-k // 32) * format.bits
    words = rng.integers(0, 2**32, (3, size), dtype=np.uint32)
    scale = np.array([[0.5], [2.0], [0.0]], format.scale_dtype)
    kind = np.uint32 if scale.itemsize == 4 else np.uint16
    stored = {"codes": words, "scale": scale.view(kind)}
    tail = size * 32 // format.bits - k
    assert format.shape(stored, tail) == (3, k)
    found = decode(eqq.formats.Layout(format, tail), stored)
    np.testing.assert_array_equal(found, decoded(stored, format, k))


@pytest.mark.examples(2)
@pytest.mark.parametrize("bits", (1, 2, 4))
def test_nearly_the_best_path(bits):
    format = eqq.Trellis(bits, states=8, scale_dtype=jnp.float32)
    w = np.round(148 * np.array(normal(4, 64))).clip(-600, 600)
    # (Of integers, each is in units as it is.)
    stored = jax.jit(lambda w: format.encode(w, jnp.ones((4, 1))))(w)
    errors = np.sum((decoded(stored, format, 64) - w) ** 2, -1)
    best = np.array([best_error(row[::-1], format) for row in w])
    assert np.all(errors >= best)
    assert np.sum(errors) < 1.05 * np.sum(best)


# Of rows of numbers that are normally distributed.
def signal_to_noise(format, rows, k=1024, seed=0):
    w = normal(rows, k, seed=seed)
    q = eqq.quantize(w, format, axis=-1)
    assert q.bits_per_weight == format.bits + 16 / k
    error = np.asarray(q.dequantize(), np.float64) - w
    return 10 * np.log10(np.sum(np.square(w, dtype=np.float64)) / np.sum(error**2))


@pytest.mark.parametrize("bits, least", [(2, 11.3), (3, 17.0), (4, 22.7)])
def test_signal_to_noise(bits, least):
    assert signal_to_noise(eqq.Trellis(bits, states=12), 8) > least


# (With the native library, or else this takes long.)
@pytest.mark.examples(1)
@pytest.mark.parametrize("bits, least", [(2, 11.4), (3, 17.4), (4, 23.2)])
def test_signal_to_noise_with_more_states(bits, least):
    assert signal_to_noise(eqq.Trellis(bits), 2) > least


@pytest.mark.parametrize(
    "arguments, error, text",
    [
        ((0,), ValueError, "`bits` should be from 1 to 8. Got 0."),
        ((9,), ValueError, "`bits` should be from 1 to 8. Got 9."),
        ((2.0,), TypeError, "`bits` should be an integer from 1 to 8. Got 2.0"),
        ((2, 7), ValueError, "`states` should be from 8 to 16. Got 7."),
        ((2, 17), ValueError, "`states` should be from 8 to 16. Got 17."),
        ((2, True), TypeError, "`states` should be an integer from 8 to 16. Got True"),
        ((2, 12, "3inst"), ValueError, "`code` should be 'mul1'. Got '3inst'."),
    ],
)
@pytest.mark.usefixtures("unchecked")
def test_errors(arguments, error, text):
    with pytest.raises(error, match=re.escape(text)):
        eqq.Trellis(*arguments)


# Rows do not depend on each other, nor tiles on how many there are.
def test_tiles_are_alone():
    format, w = eqq.Trellis(3, states=8), normal(3, 600)
    of_all = encode(format, w)
    one = jax.jit(format.encode)(w[1])
    np.testing.assert_array_equal(of_all["codes"][1], one["codes"])
    scale = of_all["scale"].view(jnp.float16).astype(jnp.float32)
    second = jax.jit(format.encode)(w[:, 256:512], scale)
    np.testing.assert_array_equal(of_all["codes"][:, 24:48], second["codes"])


def best_with_feedback(w, target, feedback, weights, format, seam):
    """The states of the path of which each point comes near to its target and to what
    the errors of those after it ask: each path that survives has errors of its own. In
    float64, from the last number to the first."""
    value, state = points(format), np.arange(2**format.states)
    groups = 2 ** (format.states - format.bits)
    cost = np.where(np.arange(groups) == seam, 0.0, np.inf)
    errors, paths = np.zeros((groups, len(w))), np.zeros((groups, len(w)), int)
    for i in reversed(range(len(w))):
        aim = target[i] + errors @ feedback[:, i]
        before = state >> format.bits
        costs = cost[before] + weights[i] * (aim[before] - value) ** 2
        best = costs.reshape(-1, groups).argmin(0) * groups + np.arange(groups)
        cost, parent = costs[best], best >> format.bits
        errors, paths = errors[parent], paths[parent]
        errors[:, i], paths[:, i] = w[i] - value[best], best
    return paths[seam]


def fed(k, seed=0):
    """Rows of a tile, in units of the scale, and what their errors ask."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2 * k, k)) @ rng.standard_normal((k, k)) ** 3
    gram = x.T @ x / np.mean(np.sum(x**2, 0)) + 0.01 * np.eye(k)
    root = np.linalg.cholesky(gram)
    w = 148 * np.array(normal(4, k))
    target = w + 20 * rng.standard_normal(w.shape)
    weights = np.diag(root) ** 2 / np.mean(np.diag(root) ** 2)
    lower = np.tril(root / np.diag(root), -1)
    return tuple(a.astype(np.float32) for a in (w, target, lower, weights))


def loss_of(numbers, w, target, lower, weights):
    """Of the differences from targets, and from what errors ask."""
    numbers = np.asarray(numbers, np.float64)
    aim = target + (w - numbers) @ lower
    return np.sum(weights * (aim - numbers) ** 2, -1)


@pytest.mark.examples(1)
@pytest.mark.parametrize("k", (64, 96))
@pytest.mark.parametrize("bits, states", [(1, 9), (2, 8), (3, 9), (4, 8), (8, 8)])
def test_nearest_tile(bits, states, k):
    format = eqq.Trellis(bits, states=states, scale_dtype=jnp.float32)
    w, target, lower, weights = of_tile = fed(k)
    one = jnp.ones((len(w), 1))
    codes = jax.jit(format.nearest_tile)(w, target, one, lower, weights)
    path = np.stack([states_of(row, format) for row in np.asarray(codes)])
    numbers = points(format)[path]
    np.testing.assert_array_equal(format.points(codes), numbers)
    # Where paths are closed is up to the format: the bits of the first state that the
    # last number has, too.
    wanted = []
    for row in range(len(w)):
        seam = path[row, 0] % 2 ** (format.states - format.bits)
        best = best_with_feedback(
            w[row].astype(np.float64), target[row], lower, weights, format, seam
        )
        wanted.append(points(format)[best])
    wanted = np.stack(wanted)
    # In float32, paths that are nearly as good as others may be chosen.
    assert np.mean(np.all(wanted == numbers, -1)) >= 0.75
    new, old = (loss_of(a, *of_tile) for a in (numbers, wanted))
    np.testing.assert_allclose(new, old, rtol=0.05)


# As if errors asked for nothing, it would be the nearest.
@pytest.mark.thorough
def test_feedback_is_worth_it():
    format = eqq.Trellis(2, states=8, scale_dtype=jnp.float32)
    w, _, lower, weights = fed(256)
    one, none = jnp.ones((len(w), 1)), np.zeros_like(lower)
    nearest_tile, points = jax.jit(format.nearest_tile), jax.jit(format.points)
    losses = [
        np.sum(loss_of(points(codes), w, w, lower, weights))
        for codes in (nearest_tile(w, w, one, f, weights) for f in (lower, none))
    ]
    assert losses[0] < 0.6 * losses[1]
    plain = jax.jit(format.encode)(w, one)["codes"]
    apart = nearest_tile(w, w, one, none, np.ones_like(weights))
    error = lambda codes: np.sum((np.asarray(points(codes)) - w) ** 2)
    assert error(apart) < 1.02 * error(plain)
