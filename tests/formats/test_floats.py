"""Floating-point codes against torchao and bitsandbytes, and against `ml_dtypes`.

`torch_floats.npz` holds a weight `w` of 16 x 128 numbers, and codes, scales and numbers
that were made of it with torch 2.15.0: by torchao 0.18.0, `fp8_*` (its primitives
`_choose_scale_float8`, with no scale of zero, and `_quantize_affine_float8`), `mxfp8_*`
and `mxfp4_*` (`to_mx`) and `nvfp4_*` (`nvfp4_quantize`); by bitsandbytes 0.50.2,
`bnbfp4_*` (`quantize_4bit` on a CPU).
"""

import pathlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import pack
from eqquant.formats._fp4 import to_e2m1
from eqquant.formats._fp8 import from_float8, to_float8
from eqquant.formats._mx import _power


@pytest.fixture(scope="module")
def samples():
    path = pathlib.Path(__file__).parents[1] / "data" / "torch_floats.npz"
    with np.load(path) as file:
        return dict(file)


def quantized(w, format):
    stored = jax.jit(format.encode)(w)
    return stored, jax.jit(format.decode, static_argnums=1)(stored, 0)


_formats = {
    "fp8_e4m3_channel": eqq.FP8(),
    "fp8_e4m3_tensor": eqq.FP8(scale="tensor"),
    "fp8_e4m3_block": eqq.FP8(block_size=32),
    "fp8_e5m2_channel": eqq.FP8("e5m2"),
    "fp8_e5m2_tensor": eqq.FP8("e5m2", scale="tensor"),
    "fp8_e5m2_block": eqq.FP8("e5m2", 32),
    "mxfp8_e4m3": eqq.MXFP8(),
    "mxfp8_e5m2": eqq.MXFP8("e5m2"),
    "mxfp4": eqq.MXFP4(),
    "nvfp4": eqq.NVFP4(),
}


@pytest.mark.examples(5)
@pytest.mark.parametrize("name", _formats)
def test_torchao(samples, name):
    stored, decoded = quantized(samples["w"], _formats[name])
    np.testing.assert_array_equal(stored["codes"], samples[f"{name}_codes"])
    scale = samples[f"{name}_scale"]
    ours = np.asarray(stored["scale"]).view(scale.dtype)
    np.testing.assert_array_equal(ours.ravel(), scale.ravel())
    np.testing.assert_array_equal(decoded, samples[f"{name}_dequant"])
    if name == "nvfp4":
        ours = np.asarray(stored["global_scale"]).view(np.float32)
        np.testing.assert_array_equal(ours, samples["nvfp4_global"])


def test_bitsandbytes(samples):
    stored, decoded = quantized(samples["w"], eqq.formats.BnbFP4())
    # Its first code is in the high nibble.
    codes = np.asarray(stored["codes"]).reshape(-1, 1)
    np.testing.assert_array_equal(codes << 4 | codes >> 4, samples["bnbfp4_codes"])
    scale = np.asarray(stored["scale"]).view(np.float32)
    np.testing.assert_array_equal(scale.ravel(), samples["bnbfp4_absmax"])
    np.testing.assert_array_equal(decoded, samples["bnbfp4_dequant"])


def test_inverse_scale_of_a_matrix(samples):
    # As compressed-tensors stores and reads it.
    stored, decoded = quantized(samples["w"], eqq.NVFP4(inverse=True))
    whole = np.asarray(stored["global_scale"]).view(np.float32)
    largest = np.max(np.abs(samples["w"]))
    np.testing.assert_allclose(whole, 448 * 6 / largest, rtol=1e-6)
    scale = np.asarray(stored["scale"]).view(ml_dtypes.float8_e4m3fn)
    scale = np.repeat(scale.astype(np.float32) / whole, 16, axis=-1)
    codes = np.asarray(stored["codes"])
    codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(16, 128)
    points = codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float32)
    np.testing.assert_array_equal(decoded, points * scale)


def numbers():
    # Every number of few bits, those halfway between them, their neighbours, and what
    # is beyond.
    points = [
        np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
        for dtype in (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2)
    ]
    x = np.unique(np.concatenate(points))
    x = x[np.isfinite(x)]
    x = np.concatenate([x, (x[1:] + x[:-1]) / 2, [449, 464, 465, 61441, 3e38]])
    x = x.astype(np.float32)
    up, down = (np.nextafter(x, np.float32(s * np.inf)) for s in (1, -1))
    x = np.concatenate([x, up, down, -x, [np.inf, -np.inf, 0, -0.0]])
    x = x.astype(np.float32)
    # Subnormal numbers of float32 are another matter.
    return x[(np.abs(x) > 1e-30) | (x == 0)]


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_cast_to_float8(name):
    # A cast alone gives NaN, or infinity, for what is too large; torch's does not.
    x, dtype = numbers(), eqq.FP8(name).dtype
    codes = jax.jit(to_float8, static_argnums=1)(x, dtype)
    largest = float(ml_dtypes.finfo(dtype).max)
    wanted = np.clip(x, -largest, largest).astype(dtype)
    np.testing.assert_array_equal(codes, wanted.view(np.uint8))
    decoded = jax.jit(from_float8, static_argnums=1)(codes, dtype)
    np.testing.assert_array_equal(decoded, wanted.astype(np.float32))
    assert np.max(decoded) == largest


def test_cast_to_float4():
    x = numbers()
    codes = jax.jit(to_e2m1)(x)
    wanted = x.astype(ml_dtypes.float4_e2m1fn)
    np.testing.assert_array_equal(codes, wanted.view(np.uint8))
    codes = jnp.arange(16, dtype=jnp.uint8)
    points = np.arange(16, dtype=np.uint8).view(ml_dtypes.float4_e2m1fn)
    decoded = eqq.FP4().to_points(codes)
    np.testing.assert_array_equal(decoded, points.astype(np.float32))
    np.testing.assert_array_equal(np.signbit(decoded), np.arange(16) >= 8)


def test_powers_of_two():
    exponents = np.arange(256, dtype=np.uint8)
    wanted = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    np.testing.assert_array_equal(jax.jit(_power)(exponents), wanted)


@pytest.mark.parametrize(
    "format, point",
    [
        (eqq.MXFP4(), ml_dtypes.float4_e2m1fn),
        (eqq.MXFP8(), ml_dtypes.float8_e4m3fn),
        (eqq.MXFP8("e5m2"), ml_dtypes.float8_e5m2),
    ],
)
def test_every_code_and_scale(format, point):
    # Numbers that are subnormal in float32 as well, which a product would flush.
    levels = 16 if isinstance(format, eqq.MXFP4) else 256
    codes = (np.arange(max(32, levels)) % levels).astype(np.uint8)
    points = codes.view(point).astype(np.float64)
    exponents = np.arange(256, dtype=np.uint8)[:, None]
    powers = exponents.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = (points * powers).astype(np.float32)
    packed = pack(jnp.asarray(codes), levels)
    stored = {
        "codes": jnp.tile(packed, (256, 1)),
        "scale": jnp.tile(exponents, (1, len(codes) // 32)),
    }
    decoded = jax.jit(format.decode, static_argnums=1)(stored, 0)
    np.testing.assert_array_equal(decoded, wanted)


def test_integers_are_rounded_and_saturated():
    # A cast to an integer of few bits would cut off what follows the point.
    w = np.array([7.6, -8.4, 6.5, -6.5, 7.5, -7.5] + [0] * 10, np.float32)
    scale = np.ones((1,), np.float32)
    for format, least, most in (
        (eqq.Int4(16), -7, 7),
        (eqq.Int(4, 16), -8, 7),
        (eqq.Int(3, 16), -4, 3),
    ):
        stored = jax.jit(format.encode)(w, scale)
        decoded = jax.jit(format.decode, static_argnums=1)(stored, 0)
        wanted = np.clip(np.round(w), least, most)
        np.testing.assert_array_equal(decoded, wanted)


@pytest.mark.parametrize(
    "format", (eqq.MXFP4(), eqq.MXFP8(), eqq.MXFP8("e5m2")), ids=str
)
def test_the_smallest_exponents(format):
    # The power of two that the specification asks for would be a subnormal number.
    unit = np.linspace(-1, 1, 32, dtype=np.float64)
    for power in range(-124, -100):
        w = jnp.asarray(np.float32(unit * 2.0**power))
        found = np.asarray(eqq.quantize(w, format).dequantize(), np.float64)
        assert np.max(np.abs(found * 2.0**-power - unit)) < 0.26, power
