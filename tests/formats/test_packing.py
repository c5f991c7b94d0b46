import math

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import _packing
from eqquant.formats._packing import per_byte

from ..helpers import native_formats


# As one program each.
pack = jax.jit(_packing.pack, static_argnums=1)
unpack = jax.jit(_packing.unpack, static_argnums=(1, 2))


@pytest.mark.parametrize("levels, number", [(2, 8), (3, 5), (16, 2), (256, 1)])
def test_codes_per_byte(levels, number):
    assert per_byte(levels) == number


@pytest.mark.examples(4)
@pytest.mark.parametrize("levels", range(2, 17))
def test_every_byte(levels):
    p = per_byte(levels)
    packed = np.arange(levels**p, dtype=np.uint8)
    # The first code is the lowest digit.
    digits = [
        [byte // levels**i % levels for i in range(p)] for byte in range(levels**p)
    ]
    codes = unpack(packed[:, None], levels, 0)
    assert codes.dtype == jnp.uint8
    np.testing.assert_array_equal(codes, digits)
    np.testing.assert_array_equal(pack(codes, levels), packed[:, None])


@pytest.mark.parametrize("levels", [2, 3, 16])
def test_missing_codes_are_zeros(levels):
    p = per_byte(levels)
    for k in (1, p - 1, p + 1):
        codes = np.full((3, k), levels - 1, np.uint8)
        packed = pack(codes, levels)
        assert packed.shape == (3, math.ceil(k / p))
        tail = packed.shape[1] * p - k
        np.testing.assert_array_equal(unpack(packed, levels, tail), codes)
        assert np.all(np.asarray(unpack(packed, levels, 0))[:, k:] == 0)


# A row of two numbers that are the scale and its negative, or nothing.
@pytest.mark.parametrize(
    "format, w, byte",
    [
        (eqq.NF4(), [1.0, 0.0], 0x7F),
        (eqq.NF4(), [0.0, -1.0], 0x07),
        (eqq.Int4(), [7.0, -7.0], 0x1F),
        (eqq.Int4(), [0.0, 7.0], 0xF8),
        (eqq.Int4(symmetric=False), [15.0, 0.0], 0x0F),
        (eqq.Ternary(), [1.0, -1.0, 1.0, 1.0, -1.0], 2 + 2 * 9 + 2 * 27),
        (eqq.Binary(), [1.0, -1.0, -1.0, 1.0], 0b1001),
    ],
)
def test_order(format, w, byte):
    q = eqq.quantize(np.array(w, np.float32), format)
    np.testing.assert_array_equal(q.stored["codes"], [byte])
    np.testing.assert_array_equal(q.dequantize(), np.array(w, np.float32))
    assert q.nbytes == sum(np.asarray(a).nbytes for a in q.stored.values())


def shapes(n, k, format):
    w = jax.ShapeDtypeStruct((n, k), jnp.float32)
    return jax.eval_shape(lambda w: eqq.quantize(w, format, axis=-1), w)


def scale_bytes(format, k):
    if isinstance(format, eqq.Rotated):
        return scale_bytes(format.format, k)
    if isinstance(format, eqq.Nested):
        blocks = math.ceil(k / format.block_size)
        return math.ceil(blocks * format.scale.bits / 8) + scale_bytes(
            format.scale, blocks
        )
    blocks = 1 if format.block_size is None else math.ceil(k / format.block_size)
    affine = isinstance(format, eqq.Int4) and not format.symmetric
    return blocks * (format.scale_dtype.itemsize + affine)


@native_formats
@pytest.mark.parametrize("k", [131, 512])
def test_bytes(format, k):
    q = shapes(6, k, format)
    leaves = jtu.tree_leaves(q.stored)
    assert all(jnp.issubdtype(a.dtype, jnp.integer) for a in leaves)
    codes = math.ceil(k / round(8 / format.bits))
    scales = scale_bytes(format, k)
    shared = isinstance(format, eqq.Ternary) and format.scale == "tensor"
    assert q.nbytes == 6 * codes + (scales if shared else 6 * scales)
    assert q.bits_per_weight == 8 * q.nbytes / (6 * k)


@pytest.mark.parametrize(
    "format, bits",
    [
        (eqq.NF4(64), 4.5),
        (eqq.NF4(64, jnp.bfloat16), 4.25),
        (eqq.Int8(), 8 + 32 / 4000),
        (eqq.Int4(32, symmetric=False), 4 + 40 / 32),
        (eqq.Ternary(), 1.6 + 32 / 4000),
        (eqq.Ternary(scale="tensor"), 1.6 + 32 / 32000),
        (eqq.Binary(), 1 + 32 / 4000),
    ],
)
def test_bits_per_weight(format, bits):
    k = 4096 if format.block_size is not None else 4000
    q = shapes(8, k, format)
    assert q.bits_per_weight == pytest.approx(bits, rel=1e-12)
