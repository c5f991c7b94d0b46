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


def test_methods_are_refused():
    format, w = eqq.Trellis(2, states=8), normal(4, 64)
    with pytest.raises(ValueError, match="pass `method=None` for that format"):
        eqq.GPTQ().solve(w, format, jnp.eye(64))
