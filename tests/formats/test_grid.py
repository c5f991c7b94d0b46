"""Codes, scales and offsets: what a kernel reads, of every format on a grid."""

from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
import eqquant.formats as eqf
from eqquant.formats import encode, spread

from ..helpers import error, formats, normal, over


scaled = over([n for n, f in formats.items() if isinstance(f, eqf.AbstractScaled)])


@pytest.mark.examples(2)
@scaled
def test_codes_scales_and_offsets(format):
    (scales, expected), of_base, found = read(normal(5, 81), format)
    if of_base is not None:
        np.testing.assert_array_equal(of_base[0], scales)
        np.testing.assert_array_equal(of_base[1], expected)
    if found is not None:
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@jax.jit(static_argnums=1)
def read(w, format):
    """The scales and the numbers; those by the base of a composite format; and the
    numbers from codes, scales and offsets."""
    stored, layout = encode(w, format)
    tail = layout.tail
    both = lambda: (format.scales(stored, tail), format.decode(stored, tail))
    expected, of_base = both(), None
    if isinstance(format, eqq.formats.AbstractComposite):
        stored, format = format.flat(stored, tail), format.base
        of_base = both()
    if not isinstance(format, eqq.AbstractGrid) or format.ordered:
        return expected, of_base, None
    each = lambda of_blocks: spread(of_blocks, format.block_size, w.shape[-1])
    points = format.to_points(format.unpack(stored["codes"], tail))
    scale, offset = format.scales(stored, tail), format.offsets(stored)
    found = points * each(scale)
    if format.offset == "zero_point":
        found = found - each(offset * scale)
    elif format.offset == "minimum":
        found = found + each(offset)
    else:
        assert offset is None
    return expected, of_base, found


def test_the_family():
    family = eqq.AbstractGrid | eqf.AbstractComposite | eqq.Rotated
    others = {type(f) for f in formats.values() if not isinstance(f, family)}
    assert others == {eqq.Trellis}


class Evens(eqq.AbstractGrid):
    """Even numbers from 0 to 6, times a scale, plus the minimum of the block."""

    block_size: int | None = eqx.field(default=32, static=True)
    offset: ClassVar[Any] = "minimum"
    levels: ClassVar[int] = 4
    scale_dtype: ClassVar[Any] = jnp.dtype("float32")

    def fit(self, blocks, size):
        return jnp.ptp(blocks, -1, keepdims=True) / 6

    def fit_offset(self, blocks, size, scale):
        return jnp.min(blocks, -1, keepdims=True)

    def to_codes(self, blocks, size, scale):
        return jnp.round(blocks / scale / 2)

    def to_points(self, codes):
        return 2 * codes.astype(jnp.float32)


@pytest.mark.parametrize("rows", (1, 40))
def test_minima_from_outside(rows):
    w, x = normal(64, 48), normal(rows, 64, seed=1)
    q = eqq.quantize(w, Evens())
    # Two numbers of the grid are at most a third of the range apart.
    assert np.max(np.abs(q.dequantize() - w)) <= np.ptp(w) / 6
    assert error(x @ q, x, q.dequantize()) < 1e-5
    assert "without minima" in str(eqq.explain(x, q))


def test_no_zero_points_where_kernels_have_none():
    q = eqq.quantize(normal(64, 48), eqq.Int4(None, symmetric=False))
    x = normal(40, 64, seed=1)
    assert error(x @ q, x, q.dequantize()) < 1e-2
    with pytest.raises(ValueError, match="without zero-points"):
        eqq.qmatmul(x, q, kernel="integer_tiles")
