import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import AbstractDithered
from eqquant.train import Stochastic
from eqquant.train._low_precision._operand import rounded

from .reference import dynamic


seeds = 1024


def points(format):
    """The points of a format, in float64."""
    if isinstance(format, eqq.Dynamic8):
        signed = dynamic()
        if format.signed:
            return signed
        sizes = 10.0 ** np.arange(-6, 1)
        parts = [2 * 2**i for i in range(7)]
        middles = [
            size * (0.1 + 0.9 * (np.arange(n) + 0.5) / n)
            for size, n in zip(sizes, parts)
        ]
        return np.concatenate([[0.0], *middles, [1.0]])
    if format.signed:
        return np.arange(-7, 8) * np.abs(np.arange(-7, 8)) / 49
    return np.arange(1, 17) ** 2 / 256


def between(points):
    """The points, and numbers between each two."""
    low, high = points[:-1], points[1:]
    parts = [low + part * (high - low) for part in (0.05, 0.3, 0.5, 0.9)]
    return np.concatenate([points, *parts])


def check_means(w, draws, points):
    """Of draws of rounded numbers: each is one of the two points next to the number,
    and their mean is the number."""
    w = w.astype(np.float64)
    above = np.clip(np.searchsorted(points, w * (1 + 2e-6 * np.sign(w))), 1, None)
    low, high = points[above - 1], points[np.minimum(above, len(points) - 1)]
    slack = 1e-6 * np.abs(w)
    near = np.minimum(np.abs(draws - low), np.abs(draws - high))
    assert np.all(near <= 2 * slack + 1e-30)
    deviation = np.sqrt(np.maximum((high - w) * (w - low), 0) / len(draws))
    # What is a point but for rounding errors of float32 is always this one.
    error = np.abs(draws.mean(0) - w)
    assert np.all(error <= 5.5 * deviation + slack + 1e-4 * (high - low))


dithered = [
    format(None, signed=signed, dithered=True)
    for format in (eqq.Dynamic8, eqq.Square4)
    for signed in (True, False)
]


def test_these_are_all():
    types = {cls for cls in AbstractDithered.__subclasses__()}
    assert types == {type(format) for format in dithered}


# At and between all points: over all orders of magnitude, of both signs, and next to
# zero. In an optimizer, the seed is the number of the step.
@pytest.mark.examples(6)
@pytest.mark.parametrize("size", (1.0, 3e-20, -0.7))
@pytest.mark.parametrize("format", dithered, ids=str)
def test_means(format, size):
    ends = points(format) * abs(size)
    w = between(ends).astype(np.float32)
    if format == eqq.Dynamic8(None, signed=False, dithered=True):
        # (What is positive stays so.)
        w = w[(w == 0) | (w >= np.float32(ends[1]))]
    if format.signed and size < 0:
        # The largest is negative: it is a point, too.
        w = w[w <= -w.min()]
        assert w.max() < ends[-1]

    @jax.jit
    def draw(seed):
        stored = format.encode_dithered(jnp.asarray(w)[None], seed)
        return format.decode(stored, -w.size % int(8 // format.bits))[0]

    draws = jax.vmap(draw)(jnp.arange(seeds))
    check_means(w, np.asarray(draws, np.float64), ends)


# Without a seed, by the bits of each number: over numbers that are nearly the same.
@pytest.mark.examples(2)
@pytest.mark.parametrize("format", dithered, ids=str)
def test_means_of_hashes(format):
    ends = points(format)
    w = between(ends)
    w = w if format.signed else w[w >= ends[ends > 0][0]]
    w = np.append(w, 1)
    near = 1 - 1e-3 * np.random.default_rng(0).uniform(0, 1, (seeds, w.size))
    near = np.where(np.isin(w, ends), w, near * w).astype(np.float32)
    near[:, -1] = 1
    found = np.asarray(eqq.quantize(near, format, axis=-1).dequantize(), np.float64)
    check_means_of_each(near, found, ends)


def check_means_of_each(w, found, points):
    w = w.astype(np.float64)
    above = np.clip(np.searchsorted(points, w), 1, len(points) - 1)
    gap = np.max((points[above] - points[above - 1]), axis=0)
    error = np.abs(np.mean(found - w, axis=0))
    assert np.all(error <= 5.5 * gap / 2 / len(w) ** 0.5 + 1e-6 * np.abs(w[0]))


# And the other roundings at random, of numbers of all sizes. (By the distance of the
# points next to zero.)
@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "format, gap",
    [
        ("int8", 1 / 127),
        ("int4", 1 / 7),
        ("nf4", 0.0911),
        ("fp8", 2**-9 / 448),
        (eqq.FP8("e5m2"), 2**-16 / 57344),
    ],
)
def test_means_of_stochastic(format, gap):
    rng = np.random.default_rng(0)
    one = 10 ** rng.uniform(-7, 0, 63) * rng.choice([-1, 1], 63)
    one, number = np.append(one, 1.0).astype(np.float32), 4 * seeds

    @jax.jit
    def draw(other):
        # The dither depends on all numbers: a row of others makes it another.
        rows = jnp.stack([other, jnp.asarray(one)])
        return rounded(rows, Stochastic(format))[1]

    others = rng.uniform(0.5, 1, (number, 64)).astype(np.float32)
    draws = np.asarray(jax.vmap(draw)(others), np.float64)
    bound = 5.5 * np.std(draws, axis=0) / number**0.5
    # A point that is rarer than one in `number` may not have been drawn.
    bound += 8 * gap / number + 1e-6 * np.abs(one)
    assert np.all(np.abs(draws.mean(0) - one) <= bound)
