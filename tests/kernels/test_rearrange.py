"""Blocks of files as stored arrays, by the native library: against `from_blocks`."""

import jax
import numpy as np
import pytest

import eqquant.kernels.native._library as library
from eqquant.formats import AbstractGGUF, Q4_0
from eqquant.kernels import rearrange

from ..helpers import formats


pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)

_gguf = {
    name: format for name, format in formats.items() if isinstance(format, AbstractGGUF)
}
_few = 5


def _found(format, rows, lead, n, around=0):
    """What is written, between so many columns of something else."""
    expected = jax.eval_shape(format.from_blocks, rows[..., :1, :])
    to = {
        name: np.full((*lead, a.shape[-1], n + around), 77, a.dtype)
        for name, a in expected.items()
    }
    within = {name: a[..., around // 2 : around // 2 + n] for name, a in to.items()}
    rearrange(rows, format.type_size, format.stored_fields, within)
    for name, a in to.items():
        assert np.all(a[..., : around // 2] == 77)
        assert np.all(a[..., around // 2 + n :] == 77)
    return within


@pytest.mark.parametrize("name", _gguf)
def test_from_blocks(name):
    format = _gguf[name]
    if format.stored_fields is None:
        assert name == "tq1_0"
        return
    rng = np.random.default_rng(0)
    # Whole tiles and lines of the cache, and one row more, or less.
    rows = rng.integers(0, 256, (2, 192, _few * format.type_size), np.uint8)
    expected = jax.jit(format.from_blocks)(rows)
    expected = {x: np.asarray(a).swapaxes(-1, -2) for x, a in expected.items()}
    for part in (slice(0, 128), slice(0, 63), slice(64, 129), slice(191, 192)):
        n = part.stop - part.start
        for around in (0, 2, 128):
            found = _found(format, rows[:, part], (2,), n, around)
            assert found.keys() == expected.keys()
            for x, a in found.items():
                assert a.dtype == expected[x].dtype
                np.testing.assert_array_equal(a, expected[x][..., part])


def test_order_of_rows():
    format = _gguf["q4_0"]
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 256, (4, 9, 2, 3 * format.type_size), np.uint8)
    swapped = rows.swapaxes(1, 2)
    assert not swapped.flags.c_contiguous
    found = _found(format, swapped, (), 72)
    expected = _found(format, swapped.reshape(72, -1), (), 72)
    for name, a in found.items():
        np.testing.assert_array_equal(a, expected[name])
    backwards = _found(format, rows[::-1], (4,), 18)
    forwards = _found(format, rows, (4,), 18)
    for name, a in backwards.items():
        np.testing.assert_array_equal(a, forwards[name][::-1])


@pytest.mark.parametrize("shape", [(0, 18), (3, 0), (0, 3, 18)])
def test_nothing(shape):
    *lead, n, j = shape
    to = {
        "codes": np.zeros((*lead, 16 * j // 18, n), np.uint8),
        "scale": np.zeros((*lead, j // 18, n), np.uint16),
    }
    fields = Q4_0().stored_fields
    assert fields is not None
    rearrange(np.zeros(shape, np.uint8), 18, fields, to)
