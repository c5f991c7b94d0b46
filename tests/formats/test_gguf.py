"""GGUF's types against the `gguf` package, of the authors of ggml: byte for byte, and
number for number. What that package does not have is in samples made by ggml."""

import pathlib

import gguf
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import AbstractGGUFBlocks

from ..helpers import normal


simple = [
    *(
        eqq.formats.Q4_0(),
        eqq.formats.Q4_1(),
        eqq.formats.Q5_0(),
        eqq.formats.Q5_1(),
        eqq.formats.Q8_0(),
    ),
    *(eqq.formats.TQ1_0(), eqq.formats.TQ2_0(), eqq.MXFP4(ties="zero")),
]
# Of these, the package has no quantizers.
searched = [
    eqq.formats.Q2_K(),
    eqq.formats.Q3_K(),
    eqq.formats.Q4_K(),
    eqq.formats.Q5_K(),
    eqq.formats.Q6_K(),
    eqq.formats.IQ4_NL(),
    eqq.formats.IQ4_XS(),
]
# These cannot be encoded.
read = [
    eqq.formats.IQ1_M(),
    eqq.formats.IQ1_S(),
    eqq.formats.IQ2_S(),
    eqq.formats.IQ2_XS(),
    eqq.formats.IQ2_XXS(),
    eqq.formats.IQ3_S(),
    eqq.formats.IQ3_XXS(),
]
# And these the package does not know.
newest = [eqq.formats.Q1_0(), eqq.formats.Q2_0()]


def over(formats):
    ids = [type(format).__name__ for format in formats]
    return pytest.mark.parametrize("format", formats, ids=ids)


def type_of(format):
    return gguf.GGMLQuantizationType[type(format).__name__]


encode = jax.jit(lambda format, w: format.encode(w), static_argnums=0)
decode = jax.jit(
    lambda format, stored, tail: format.decode(stored, tail), static_argnums=(0, 2)
)
from_blocks = jax.jit(
    lambda format, blocks: format.from_blocks(blocks), static_argnums=0
)
to_blocks = jax.jit(
    lambda format, stored, tail: format.to_blocks(stored, tail), static_argnums=(0, 2)
)


def tail(format, stored, k):
    return format.shape(stored, 0)[-1] - k


def weights():
    rng = np.random.default_rng(0)
    w = (0.02 * rng.standard_t(5, (16, 512))).astype(np.float32)
    w[0], w[1, :32] = 0, 0
    # Scales that are subnormal in float16, and large ones.
    w[2] *= 1e-5
    w[3] *= 1e6
    # Of equal absolute values the first counts; halves; what is ternary already.
    w[4, ::2] = -w[4, 1::2]
    w[5] = rng.integers(-16, 17, 512) / 2
    w[6] = rng.integers(-1, 2, 512) * 0.3
    w[7:] = w[7:].astype(ml_dtypes.bfloat16)
    return w


@pytest.mark.examples(3)
@over(simple)
def test_encode(format):
    w = weights()
    stored = encode(format, w)
    ours = to_blocks(format, stored, tail(format, stored, 512))
    with np.errstate(divide="ignore", over="ignore"):
        theirs = gguf.quants.quantize(w, type_of(format))
    np.testing.assert_array_equal(ours, theirs)


@pytest.mark.examples(8)
@over([*simple, *searched, *read])
def test_decode(format):
    # Any bytes there may be. (Those of scales, too: infinities and NaNs among them.)
    size = 8 * 256 // format.block_size * format.type_size
    blocks = np.random.default_rng(0).integers(0, 256, (16, size), np.uint8)
    if isinstance(format, eqq.MXFP4):
        # In the specification, this is NaN.
        blocks[:, :: format.type_size] %= 255
    stored = from_blocks(format, blocks)
    missing = tail(format, stored, 2048)
    assert format.shape(stored, missing) == (16, 2048)
    with np.errstate(invalid="ignore", over="ignore"):
        theirs = gguf.quants.dequantize(blocks, type_of(format))
    ours = decode(format, stored, missing)
    np.testing.assert_array_equal(ours, theirs)
    # Other bytes of `TQ1_0` than those that are written say the same.
    if not isinstance(format, eqq.formats.TQ1_0):
        again = to_blocks(format, stored, missing)
        np.testing.assert_array_equal(again, blocks)


@pytest.mark.examples(2)
@over([*simple, *searched])
def test_a_last_block_that_is_short(format):
    k = 300
    stored = encode(format, normal(3, k))
    missing = tail(format, stored, k)
    blocks = to_blocks(format, stored, missing)
    decoded = gguf.quants.dequantize(np.asarray(blocks), type_of(format))
    assert decoded.shape == (3, -(-k // format.block_size) * format.block_size)
    ours = decode(format, stored, missing)
    np.testing.assert_array_equal(ours, decoded[:, :k])


# Of normal numbers, in decibels. (What weighs the errors is not their squares alone.)
expected = {"Q2_K": 9.0, "Q3_K": 14.2, "Q4_K": 21.3, "Q5_K": 27.7, "Q6_K": 33.4}
expected |= {"IQ4_NL": 21.0, "IQ4_XS": 20.9}


@pytest.mark.examples(1)
@over(searched)
def test_search(format):
    w = np.asarray(normal(64, 1024))
    stored = encode(format, w)
    blocks = np.asarray(to_blocks(format, stored, 0))
    decoded = gguf.quants.dequantize(blocks, type_of(format))
    noise = np.sum((decoded - w) ** 2)
    sqnr = 10 * np.log10(np.sum(np.square(w)) / noise)
    assert sqnr > expected[type(format).__name__]
    # Of numbers that are as small as float16 weights may be, and of large ones.
    # (Scales of `IQ4` types are a 127th of the largest number: these are zero first.)
    least = 1e-4 if type(format).__name__ in ("IQ4_NL", "IQ4_XS") else 1e-6
    for size in (least, 1e3):
        stored = encode(format, np.float32(size) * w[:4, :256])
        small = np.asarray(decode(format, stored, 0)) / size
        error = np.linalg.norm(small - w[:4, :256]) / np.linalg.norm(w[:4, :256])
        assert error < 1.5 * 10 ** (-sqnr / 20) + 0.1 * (size < 1)


# A small block of one number has no range to divide, and yet a minimum.
@pytest.mark.parametrize("format", searched, ids=str)
@pytest.mark.parametrize("number", [-1.0, 0.5])
def test_constant_blocks(format, number):
    w = np.array(normal(2, 512))
    w[0, :96] = w[1] = number
    found = np.asarray(eqq.quantize(jnp.asarray(w), format, axis=-1).dequantize())
    assert np.max(np.abs(found[1] - number)) < 0.001
    # What is stored of scales and minima has units of the large block.
    assert np.max(np.abs(found[0, :96] - number)) < 0.1


@over([format for format in searched if isinstance(format, AbstractGGUFBlocks)])
def test_no_given_scales(format):
    with pytest.raises(ValueError, match="have several scales"):
        format.encode(jnp.ones((2, 256)), jnp.ones((2, 1)))


# Made by ggml, of llama.cpp in llama-cpp-python 0.3.36: for each type, rows of random
# bytes with scales that are neither small nor large, and what its `dequantize_row_*`
# decodes; and for those that can be encoded, what `ggml_quantize_chunk` makes of `w`.
samples = pathlib.Path(__file__).parents[1] / "data" / "gguf_types.npz"


@pytest.fixture(scope="module")
def sample():
    return np.load(samples)


@pytest.mark.examples(2)
@over([*newest, *read, *searched[-2:]])
def test_decode_as_ggml(format, sample):
    name = type(format).__name__
    stored = from_blocks(format, sample[name])
    np.testing.assert_array_equal(decode(format, stored, 0), sample[f"{name}.numbers"])
    np.testing.assert_array_equal(to_blocks(format, stored, 0), sample[name])


@pytest.mark.examples(1)
@over([*newest, *searched[-2:]])
def test_encode_as_ggml(format, sample):
    w = sample["w"].astype(np.float32)
    stored = encode(format, w)
    theirs = sample[f"{type(format).__name__}.encoded"]
    if format in newest:
        np.testing.assert_array_equal(to_blocks(format, stored, 0), theirs)
    error = lambda stored: np.sum((decode(format, stored, 0) - w) ** 2)
    assert error(stored) < 1.001 * error(from_blocks(format, theirs))


@over(read)
def test_cannot_be_encoded(format):
    name = type(format).__name__
    message = rf"Nothing can be quantized in {name}\(\), .* Quantize in `IQ4_XS\(\)`"
    w = normal(256, 32)
    for quantize in (
        lambda: eqq.quantize(w, format),
        lambda: eqq.quantize(w, name.lower()),
        lambda: jax.jit(lambda w: eqq.quantize(w, format))(w),
        lambda: eqq.tree_quantize({"a": w}, format, min_size=0),
        lambda: eqq.quantize(w, "nf4", activation=format),
        lambda: eqq.straight_through(w, format),
    ):
        with pytest.raises(ValueError, match=message):
            quantize()
