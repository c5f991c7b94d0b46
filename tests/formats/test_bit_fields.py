import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqquant.formats import AbstractGGUFBlocks, pack_bits, stream_fields
from eqquant.formats._bit_fields import BitField, bits_of
from eqquant.formats.gguf import _fields

from ..helpers import formats


# Packings as data agree with those that write and read.


def read(bytes, codes):
    found = [
        sum(
            (bytes[..., byte].astype(int) >> start & 2**number - 1) << at
            for byte, start, number, at in fields
        )
        for fields in codes
    ]
    return np.stack(found, axis=-1)


@pytest.mark.parametrize("bits", range(1, 9))
def test_streams(bits):
    codes = np.random.default_rng(0).integers(0, 2**bits, (3, 48))
    codes = codes.astype(np.uint8)
    packed = jax.jit(pack_bits, static_argnums=1)(jnp.asarray(codes), bits)
    found = read(np.asarray(packed), stream_fields(bits, 48))
    np.testing.assert_array_equal(found, codes)


@pytest.mark.examples(4)
@pytest.mark.parametrize(
    "name", [n for n, f in formats.items() if isinstance(f, AbstractGGUFBlocks)]
)
def test_gguf(name):
    format = formats[name]
    assert isinstance(format, AbstractGGUFBlocks)
    fields = format.fields
    blocks = np.random.default_rng(1).integers(0, 256, (7, format.type_size))
    blocks = blocks.astype(np.uint8)
    at = format.scale_at
    halves = np.asarray([0.5, 0.25], np.float16)[: format.halves]
    blocks[:, at : at + 2 * format.halves] = halves.view(np.uint8)

    codes, scale, low = jax.jit(format.split_blocks)(jnp.asarray(blocks))
    np.testing.assert_array_equal(read(blocks, fields.codes), codes)
    if not fields.steps:
        steps, lows = np.ones((7, 1)), -np.ones((7, 1))
    else:
        steps = read(blocks, fields.steps)
        steps = steps.astype(np.int8) if fields.signed else steps - fields.zero
        lows = read(blocks, fields.lows) if fields.lows else None
    np.testing.assert_array_equal(0.5 * steps, scale)
    if low is not None:
        assert format.halves == 2 and lows is not None
        np.testing.assert_array_equal(-0.25 * lows, low)
    assert format.base.offset == (None if low is None else "minimum")


# Also of types that are packed in no order.
@pytest.mark.examples(3)
@pytest.mark.parametrize("seed", range(20))
def test_any_fields(seed):
    rng = np.random.default_rng(seed)
    size, number = 40, 24
    blocks = rng.integers(0, 256, (3, size), np.uint8)
    bits = int(rng.integers(1, 13))
    if seed % 2 == 0:
        starts = np.sort(rng.permutation(8 * size // 13)[:number]) * 13
        codes = tuple(bits_of(0, int(start), bits) for start in starts)
    else:
        places = rng.permutation(8 * size)[: bits * number].reshape(number, bits)
        codes = tuple(
            tuple(BitField(bit // 8, bit % 8, 1, at) for at, bit in enumerate(some))
            for some in places.tolist()
        )
    found = jax.jit(_fields.read, static_argnums=1)(jnp.asarray(blocks), codes)
    np.testing.assert_array_equal(found, read(blocks, codes))
    if bits <= 8:
        no = jnp.zeros((3, 0), jnp.uint8)
        again = _fields.write(found, codes, no, 0, size)
        np.testing.assert_array_equal(read(np.asarray(again), codes), found)
