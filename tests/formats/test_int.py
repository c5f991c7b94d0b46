"""Integers of any width against torchao, and against their definition in NumPy.

`torch_ints.npz` holds a weight `w` of 16 x 128 numbers, and codes, scales, zero-points
and numbers that torchao 0.18.0 made of it, in blocks of 32: by `choose_qparams_affine`,
with no least scale, `quantize_affine` and `dequantize_affine`.
"""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import pack_bits, unpack_bits

from ..helpers import error, normal


# As one program each.
pack = jax.jit(pack_bits, static_argnums=1)
unpack = jax.jit(unpack_bits, static_argnums=(1, 2))
decode = jax.jit(lambda format, stored: format.decode(stored, 0), static_argnums=0)
every_width = pytest.mark.parametrize("bits", range(2, 9))


def from_bits_of(packed, bits, k):
    """Codes from a stream of bits, the lowest first."""
    stream = np.unpackbits(np.asarray(packed), axis=-1, bitorder="little")
    stream = stream[..., : k * bits].reshape(*stream.shape[:-1], k, bits)
    return np.sum(stream * 2 ** np.arange(bits), axis=-1)


@pytest.mark.examples(2)
@every_width
def test_packing(bits):
    for k in (1, 7, 40):
        codes = np.random.default_rng(k).integers(0, 2**bits, (3, k), np.uint8)
        packed = pack(codes, bits)
        np.testing.assert_array_equal(from_bits_of(packed, bits, k), codes)
        # Whole units: the fewest bytes that codes end with.
        unit = np.lcm(bits, 8)
        assert packed.shape == (3, -(-k * bits // unit) * unit // 8)
        tail = packed.shape[1] * 8 // bits - k
        np.testing.assert_array_equal(unpack(packed, bits, tail), codes)


def expected(w, bits, offset):
    """In float64, of one block."""
    w = np.asarray(w, np.float64)
    most, half = 2**bits - 1, 2 ** (bits - 1)
    if offset is None:
        scale = np.max(np.abs(w), -1, keepdims=True) / (most / 2)
        return (np.clip(np.round(w / scale) + half, 0, most) - half) * scale
    low, high = np.min(w, -1, keepdims=True), np.max(w, -1, keepdims=True)
    if offset == "minimum":
        scale = (high - low) / most
        return np.clip(np.round((w - low) / scale), 0, most) * scale + low
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    scale = (high - low) / most
    zero = np.clip(np.round(-low / scale), 0, most)
    return (np.clip(np.round(w / scale) + zero, 0, most) - zero) * scale


@pytest.mark.parametrize("size, expected", [(32, -0.041), (64, -0.0205)])
def test_largest_is_half_a_step_lower(size, expected):
    w = np.asarray(normal(64, 1024), np.float64)
    q = eqq.quantize(w.astype(np.float32), eqq.Int(4, size), axis=-1)
    errors = np.asarray(q.dequantize(), np.float64) - w
    blocks = errors.reshape(-1, size) / np.asarray(q.scale, np.float64).reshape(-1, 1)
    at = np.argmax(np.abs(w.reshape(-1, size)), axis=-1)
    largest = blocks[np.arange(len(at)), at]
    np.testing.assert_allclose(np.abs(largest), 0.5, atol=1e-5)
    assert 0.85 < np.mean(largest < 0) < 0.95
    # The mean error, as the docstring has it; without the largest, there is none.
    bias = np.mean(errors) / np.std(errors)
    assert abs(bias - expected) < 0.01
    blocks[np.arange(len(at)), at] = 0
    assert abs(np.mean(blocks)) < 0.005


@pytest.mark.examples(4)
@every_width
@pytest.mark.parametrize("offset", [None, "zero_point", "minimum"])
def test_values(bits, offset):
    # Blocks that include zero, and others; the last is short.
    w = normal(4, 40) + 3 * np.arange(4, dtype=np.float32)[:, None]
    q = eqq.quantize(w, eqq.Int(bits, 16, offset), axis=-1)
    blocks = np.split(np.asarray(w), (16, 32), axis=-1)
    found = [expected(block, bits, offset) for block in blocks]
    found = np.concatenate(found, axis=-1)
    off = np.abs(np.asarray(q.dequantize(), np.float64) - found) > 1e-5
    # Of what is halfway between two steps, either one.
    assert np.mean(off) < 0.02
    step = np.repeat(np.asarray(q.scale), 16, axis=-1)[:, :40]
    assert np.all(np.abs(q.dequantize() - w) <= 1.01 * step)
    assert q.format.bits == bits


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("offset", [None, "zero_point"])
def test_torchao(bits, offset):
    path = pathlib.Path(__file__).parents[1] / "data" / "torch_ints.npz"
    with np.load(path) as file:
        samples = dict(file)
    format = eqq.Int(bits, 32, offset)
    stored = jax.jit(format.encode)(samples["w"])
    name = f"int{bits}_" + ("symmetric" if offset is None else "asymmetric")
    codes = np.asarray(unpack(stored["codes"], bits, 0))
    # Its scale of a block of zeros is not zero, but a small number.
    some = np.any(samples["w"].reshape(16, 4, 32) != 0, axis=-1)
    each = np.repeat(some, 32, axis=-1)
    np.testing.assert_array_equal(codes[each], samples[f"{name}_codes"][each])
    scale = np.asarray(stored["scale"]).view(np.float32)
    np.testing.assert_array_equal(scale[some], samples[f"{name}_scale"][some])
    if offset is not None:
        zero = np.asarray(stored["zero_point"])
        np.testing.assert_array_equal(zero[some], samples[f"{name}_zero_point"][some])
    decoded = decode(format, stored)
    np.testing.assert_array_equal(decoded, samples[f"{name}_dequant"])


@pytest.mark.parametrize("offset", [None, "zero_point", "minimum"])
def test_stored_numbers(offset):
    # Codes, scales and zero-points that no quantizer would have found.
    rng = np.random.default_rng(0)
    format = eqq.Int(5, 32, offset, scale_dtype=jnp.float16)
    codes = rng.integers(0, 32, (6, 64), np.uint8)
    scale, low = (rng.standard_normal((6, 2)).astype(np.float16) for _ in range(2))
    zero = rng.integers(0, 257, (6, 2), np.uint16)
    stored = {
        "codes": pack(codes, 5),
        "scale": scale.view(np.uint16),
        "zero_point": zero,
        "minimum": low.view(np.uint16),
    }
    scale, low, zero = (
        np.repeat(a.astype(np.float32), 32, axis=-1) for a in (scale, low, zero)
    )
    q = codes.astype(np.float32)
    wanted = {
        None: (q - 16) * scale,
        "zero_point": (q - zero) * scale,
        "minimum": q * scale + low,
    }
    np.testing.assert_array_equal(decode(format, stored), wanted[offset])


def test_order_of_blocks():
    format = eqq.Int(4, 32, "zero_point", ordered=True)
    plain = dataclasses.replace(format, ordered=False)
    w, x = normal(2, 5, 128), normal(3, 128, seed=1)
    q, expected = (eqq.quantize(w, f, axis=-1) for f in (format, plain))
    # As `encode` leaves them, they are one after another.
    np.testing.assert_array_equal(q.dequantize(), expected.dequantize())
    order = np.random.default_rng(0).permutation(128)
    rows = q.layout.to_rows(q.stored)
    codes = np.asarray(unpack(rows["codes"], 4, 0))[..., order]
    block = np.tile((order // 32).astype(np.int32), (2, 1, 1))
    rows = rows | {"codes": pack(codes, 4), "block": jax.device_put(block)}
    q = dataclasses.replace(q, stored=q.layout.from_rows(rows))
    dense = np.asarray(expected.dequantize())[..., order]
    np.testing.assert_array_equal(q.dequantize(), dense)
    np.testing.assert_array_equal(q[1][3], dense[1, 3])
    np.testing.assert_array_equal(q[1][np.array([4, 0])], dense[1, [4, 0]])
    products = jax.jit(lambda x, q: x @ q.mT)(x, q)
    assert error(products, x, dense.swapaxes(1, 2)) < 1e-5
    # A block that there is not: never a number.
    block[:, :, 5] = 77
    rows["block"] = jax.device_put(block)
    stored = q.layout.from_rows(rows)
    broken = np.asarray(dataclasses.replace(q, stored=stored).dequantize())
    assert np.all(np.isnan(broken[..., 5])) and np.sum(np.isnan(broken)) == 10
