import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eqquant.formats import AbstractGGUFBlocks, pack_bits, stream_fields

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
