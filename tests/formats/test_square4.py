import jax
import numpy as np
import pytest

import eqquant as eqq

from ..helpers import normal


signs = pytest.mark.parametrize("signed", (True, False))


def blocks(signed):
    """Blocks of 128 numbers, in float64, their scales and their points."""
    w = np.asarray(normal(64, 128), np.float64)
    w = w if signed else w**2
    roots = np.arange(-7, 8) if signed else np.arange(1, 17)
    points = roots * np.abs(roots)
    return w, np.max(np.abs(w), axis=-1, keepdims=True) / points[-1], points


def round_trip(w, **options):
    q = eqq.quantize(np.float32(w).reshape(-1), eqq.Square4(128, **options))
    return np.asarray(q.dequantize(), np.float64).reshape(w.shape), q


@signs
def test_nearest(signed):
    w, scale, points = blocks(signed)
    found, q = round_trip(w, signed=signed)
    distances = np.abs(points * scale[..., None] - w[..., None])
    expected = points[np.argmin(distances, axis=-1)] * scale
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    # Two to a byte, and a scale for each block.
    assert q.nbytes == w.size // 2 + 4 * len(w)


# What optimizers divide by is not zero, unless all of its block is.
def test_no_zero_without_a_sign():
    w = np.zeros((2, 128))
    w[0, 3], w[0, 4] = 512.0, -5.0
    found, _ = round_trip(w, signed=False)
    expected = np.stack([np.full(128, 2.0), np.zeros(128)])
    expected[0, 3] = 512
    np.testing.assert_array_equal(found, expected)


# Each becomes one of the two points next to it, the nearer one more often, and many
# have the mean that they had.
@signs
def test_dithered(signed):
    w, scale, points = blocks(signed)
    found, _ = round_trip(w, signed=signed, dithered=True)
    unit, point = w / scale, found / scale
    for low, high in zip(points[8:12], points[9:13]):
        within = (low < unit) & (unit < high)
        part = (unit[within] - low) / (high - low)
        became = (point[within] - low) / (high - low)
        np.testing.assert_allclose(became, np.round(became), atol=1e-4)
        up = np.round(became)
        assert len(up) > 100 and {*up} == {0, 1}
        # The standard deviation of one is a half at most.
        assert abs(np.mean(up - part)) < 4 * 0.5 / len(up) ** 0.5
        assert np.mean(up[part > 0.75]) > 0.75 > 0.25 > np.mean(up[part < 0.25])
    again, _ = round_trip(found, signed=signed, dithered=True)
    np.testing.assert_allclose(again, found, rtol=1e-6)


# Of a running mean of squares, whose mean is 0.3, by a thousandth in each step.
@pytest.mark.parametrize("dithered", (False, True))
def test_a_running_mean(dithered):
    format = eqq.Square4(128, signed=False, dithered=dithered)

    def step(q, z):
        mean = 0.999 * q.dequantize() + 0.001 * 0.3 * z**2
        return eqq.quantize(mean.at[0].set(1), format), None

    q = eqq.quantize(np.full(128, 0.5, np.float32), format)
    q, _ = jax.lax.scan(step, q, normal(3000, 128))
    found = np.mean(q.dequantize()[1:])
    expected = 0.3 + 0.2 * 0.999**3000
    assert (abs(found - expected) < 0.03) == dithered
