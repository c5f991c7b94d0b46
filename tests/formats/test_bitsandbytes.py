"""NF4 against bitsandbytes: against numbers of its CPU quantizer, and against its
rule written again in NumPy.

`bitsandbytes.npz` holds three weights, as `*_weight`; bytes, scales and numbers that
bitsandbytes made of them, in blocks of 64, as `*_bytes`, `*_scale` and `*_decoded`.

- `single`: sixteen rows of 128 numbers.
- `odd`: 7 x 33 numbers. Blocks run over the flattened array, and the last is short.
- `double`: sixteen rows of 128 numbers of bfloat16, by double quantization. `scale` is
  what the stored scales decode to.
"""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq


@pytest.fixture(scope="module")
def samples():
    path = pathlib.Path(__file__).parents[1] / "data" / "bitsandbytes.npz"
    with np.load(path) as file:
        return dict(file)


def high_nibble_first(packed, k):
    codes = np.stack([packed >> 4, packed & 15], axis=-1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :k]


def low_nibble_first(packed, k):
    codes = np.stack([packed & 15, packed >> 4], axis=-1)
    return codes.reshape(*packed.shape[:-1], -1)[..., :k]


def quantized(w):
    """Codes, scales and numbers of rows, by `NF4(64)`."""
    q = eqq.quantize(w, eqq.NF4(64), axis=-1)
    # The contracted axis lies first.
    codes = low_nibble_first(np.asarray(q.stored["codes"]).T, w.shape[-1])
    scale = np.asarray(q.stored["scale"]).T.view(np.float32)
    return codes, scale, np.asarray(q.dequantize())


@pytest.mark.parametrize("name", ["single", "odd"])
def test_samples(samples, name):
    # Where the blocks of rows are those of the flattened array.
    w, decoded = samples[f"{name}_weight"], samples[f"{name}_decoded"]
    if name == "odd":
        w, decoded = w.reshape(1, -1), decoded.reshape(1, -1)
    ours = quantized(w)
    codes = high_nibble_first(samples[f"{name}_bytes"], w.shape[-1])
    np.testing.assert_array_equal(ours[0], codes.reshape(w.shape))
    np.testing.assert_array_equal(ours[1].ravel(), samples[f"{name}_scale"].ravel())
    np.testing.assert_array_equal(ours[2], decoded)


def test_sample_of_double_quantization(samples):
    # Its codes belong to the scales from before these are quantized.
    w = jnp.asarray(samples["double_weight"], jnp.bfloat16)
    codes, scale, _ = quantized(w)
    np.testing.assert_array_equal(
        codes, high_nibble_first(samples["double_bytes"], w.shape[-1])
    )
    np.testing.assert_allclose(scale, samples["double_scale"], atol=0.003)
    decoded = eqq.NF4.codebook[codes] * np.repeat(samples["double_scale"], 64, axis=-1)
    decoded = np.asarray(jnp.asarray(decoded, jnp.bfloat16), np.float32)
    np.testing.assert_array_equal(decoded, samples["double_decoded"])


def test_blocks_of_scales():
    # As of one row.
    w = np.random.default_rng(0).uniform(0, 3, (12, 20)).astype(np.float32)
    q = eqq.quantize(w, eqq.formats.BnbScale(32), axis=-1)
    mean = w.mean()
    one = eqq.quantize((w - mean).reshape(-1), eqq.Dynamic8(32)).dequantize()
    np.testing.assert_allclose(q.dequantize(), one.reshape(12, 20) + mean, rtol=1e-6)
    np.testing.assert_array_equal(q[3:5], q.dequantize()[3:5])
    assert q.shape == (12, 20) and q.scale.shape == (12, 2)


#
# The rule
#

points = np.array(
    # fmt: off
    [
        -1.0,
        -0.6961928009986877,
        -0.5250730514526367,
        -0.39491748809814453,
        -0.28444138169288635,
        -0.18477343022823334,
        -0.09105003625154495,
        0.0,
        0.07958029955625534,
        0.16093020141124725,
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ],
    # fmt: on
    np.float32,
)
edges = (points[1:] + points[:-1]) / np.float32(2)


def rule(w, divide=True):
    """Codes, scales and numbers of rows, by the rule of bitsandbytes. It multiplies by
    the reciprocal of the scale, but divides by it in a block that is short."""
    codes, scales, numbers = [], [], []
    for start in range(0, w.shape[-1], 64):
        block = w[:, start : start + 64]
        scale = np.max(np.abs(block), axis=-1, keepdims=True)
        divisor = np.maximum(scale, np.float32(1e-38))
        if divide and block.shape[-1] < 64:
            unit = block / divisor
        else:
            unit = block * (np.float32(1) / divisor)
        unit = np.clip(unit, np.float32(-1), np.float32(1))
        assert unit.dtype == np.float32
        code = np.searchsorted(edges, unit, side="left")
        codes.append(code)
        scales.append(scale)
        numbers.append(points[code] * scale)
    return tuple(np.concatenate(parts, axis=-1) for parts in (codes, scales, numbers))


def assert_by_the_rule(w):
    assert w.dtype == np.float32
    for ours, theirs in zip(quantized(w), rule(w)):
        np.testing.assert_array_equal(ours, theirs)


k = 2 * 64 + 39


@pytest.mark.parametrize("size", [1.0, 0.02, 1e-35, 1e-20, 1e20, 1e36])
def test_normal(size):
    w = size * np.random.default_rng(0).standard_normal((500, k))
    assert_by_the_rule(w.astype(np.float32))


def test_zeros():
    rng = np.random.default_rng(0)
    w = rng.standard_normal((500, k)) * (rng.random((500, k)) < 0.02)
    w[:100, 32:] = 0
    assert_by_the_rule(w.astype(np.float32))


def test_ties():
    # The scales are powers of two, so that these are ties exactly.
    rng = np.random.default_rng(0)
    scale = np.ldexp(np.float32(1), rng.integers(-20, 20, (500, 1)))
    w = rng.choice(edges, (500, k)) * scale
    w[:, ::32] = rng.choice([-1, 1], (500, 1)) * scale
    assert_by_the_rule(w.astype(np.float32))
    codes, _, _ = quantized(w.astype(np.float32))
    lower = np.searchsorted(edges, w / scale)
    np.testing.assert_array_equal(codes, lower)


def test_almost_ties():
    rng = np.random.default_rng(0)
    scale = rng.uniform(0.5, 1, (500, 1)).astype(np.float32)
    w = rng.choice(edges, (500, k)) * scale
    for _ in range(2):
        towards = rng.choice([-np.inf, np.inf], w.shape).astype(np.float32)
        w = np.nextafter(w, towards)
    w[:, ::32] = scale
    # So close to an edge, a product with the reciprocal and a quotient differ.
    assert np.any(rule(w)[0] != rule(w, divide=False)[0])
    assert_by_the_rule(w)


@pytest.mark.examples(3)
@pytest.mark.parametrize("short", [1, 2, 3, 63, 64, 65])
def test_short_rows(short):
    w = np.random.default_rng(0).standard_normal((50, short))
    assert_by_the_rule(w.astype(np.float32))
