import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats._dynamic8 import codebook

from ..helpers import normal


signs = pytest.mark.parametrize("signed", (True, False))


# Of what `bitsandbytes.functional.create_dynamic_map(signed)` of version 0.50.2 returns
# as 256 numbers of float32, the CRC-32, and some of the numbers.
@pytest.mark.parametrize(
    "signed, checksum, some",
    [
        (
            True,
            454261483,
            {
                0: -0.992968738079071,
                126: -5.500000384017767e-07,
                127: 0.0,
                128: 5.500000384017767e-07,
                129: 3.250000190746505e-06,
                254: 0.992968738079071,
                255: 1.0,
            },
        ),
        (
            False,
            3899729807,
            {
                0: 0.0,
                1: 3.2500003044333425e-07,
                2: 7.749999895168003e-07,
                254: 0.9964843988418579,
                255: 1.0,
            },
        ),
    ],
)
def test_as_bitsandbytes(signed, checksum, some):
    points = codebook(signed)
    assert (points.dtype, points.shape) == (np.float32, (256,))
    for i, number in some.items():
        assert points[i] == np.float32(number)
    assert zlib.crc32(points.astype("<f4").tobytes()) == checksum


# By the definition: the middles of equal parts of each decade.
@signs
def test_definition(signed):
    positive = []
    for i in range(7):
        number = 2**i * (1 if signed else 2)
        middles = 0.1 + 0.9 * (np.arange(number) + 0.5) / number
        positive.extend(10.0 ** (i - 6) * middles)
    negative = [-x for x in positive] if signed else []
    expected = np.sort([*negative, 0, *positive, 1])
    np.testing.assert_allclose(codebook(signed), expected, rtol=1e-6)


def numbers(signed):
    """Of all sizes, and each point itself."""
    rng = np.random.default_rng(0)
    sizes = 10 ** rng.uniform(-8, 0, 20_000) * rng.choice([-1, 1], 20_000)
    found = np.concatenate([sizes, rng.uniform(-1, 1, 20_000)]).astype(np.float32)
    found = found if signed else np.abs(found)
    return np.concatenate([codebook(signed), found])


@signs
def test_nearest(signed):
    w = numbers(signed)
    q = eqq.quantize(w, eqq.Dynamic8(None, signed=signed))
    decoded = np.asarray(q.dequantize())
    points = codebook(signed).astype(np.float64)
    distances = np.abs(points[None, :] - w.astype(np.float64)[:, None])
    nearest = np.min(distances, axis=-1)
    error = np.abs(decoded.astype(np.float64) - w)
    expected = nearest
    if not signed:
        # What is positive stays so.
        small = (w > 0) & (w < points[1])
        assert np.all(decoded[small] == np.float32(points[1]))
        expected = np.where(small, points[1] - w, nearest)
    # As two points may be equally near.
    assert np.all(error <= expected + 1e-7 * np.abs(w))
    np.testing.assert_array_equal(decoded[:256], codebook(signed))


@pytest.mark.examples(3)
@signs
@pytest.mark.parametrize("size", (1e-30, 1.0, 1e30))
def test_blocks(signed, size):
    w = size * np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    w = w if signed else np.abs(w)
    q = eqq.quantize(w, eqq.Dynamic8(256, signed=signed))
    ends = [np.max(np.abs(w[i : i + 256])) for i in range(0, 1000, 256)]
    np.testing.assert_array_equal(q.scale, ends)
    assert q.nbytes == 1000 + 4 * 4
    error = np.abs(np.asarray(q.dequantize()) - w) / np.repeat(ends, 256)[:1000]
    # Half a step of the topmost decade.
    assert np.max(error) <= (0.9 / 64 if signed else 0.9 / 128) / 2 * 1.001


def test_negative_numbers_without_a_sign():
    q = eqq.quantize(jnp.array([-4.0, 1.0, 0.5, -0.1]), eqq.Dynamic8(signed=False))
    np.testing.assert_allclose(q.dequantize(), [0, 1, 0.5, 0], atol=0.004)
    q = eqq.quantize(jnp.array([-4.0, -1.0]), eqq.Dynamic8(signed=False))
    np.testing.assert_array_equal(q.dequantize(), [0, 0])


# The mean of what numbers become is the number, though it lies between points.
@signs
def test_dithered(signed):
    format = eqq.Dynamic8(None, signed=signed, dithered=True)
    points = codebook(signed).astype(np.float64)
    for low, high in ((0.2, 0.23), (0.9, 0.92), (0.02, 0.021)):
        w = np.random.default_rng(0).uniform(low, high, 50_000).astype(np.float32)
        w = np.append(w, np.float32(1))
        decoded = np.asarray(eqq.quantize(w, format).dequantize(), np.float64)
        assert decoded[-1] == 1
        above = np.searchsorted(points, w)
        # Each becomes one of the two points next to it.
        assert np.all((decoded == points[above]) | (decoded == points[above - 1]))
        gap = np.max(np.diff(points)[above - 1])
        for part in np.array_split(np.argsort(w[:-1]), 10):
            assert abs(np.mean(decoded[part] - w[part])) < 4 * gap / 2 / 5000**0.5
    fixed = eqq.quantize(codebook(signed), format).dequantize()
    np.testing.assert_array_equal(fixed, codebook(signed))


# Of a running mean of squares, whose mean is 0.3, by a thousandth in each step.
@pytest.mark.parametrize("dithered", (False, True))
def test_a_running_mean(dithered):
    format = eqq.Dynamic8(256, signed=False, dithered=dithered)

    def step(q, z):
        mean = 0.999 * q.dequantize() + 0.001 * 0.3 * z**2
        return eqq.quantize(mean.at[0].set(1), format), None

    q = eqq.quantize(jnp.full(256, 0.5).at[0].set(1), format)
    q, _ = jax.lax.scan(step, q, normal(1000, 256))
    found = np.mean(q.dequantize()[1:])
    expected = 0.3 + 0.2 * 0.999**1000
    assert (abs(found - expected) < 0.01) == dithered
