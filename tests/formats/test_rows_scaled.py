"""Rows that are multiplied by factors, with the same codes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import AbstractGrid, AbstractTiled, Layout, Rotated

from ..helpers import decode, each, encode, formats, normal


def inner(format):
    return format.format if isinstance(format, Rotated) else format


scaled = [k for k, f in formats.items() if isinstance(inner(f), AbstractGrid)]
scaled += [k for k, f in formats.items() if isinstance(inner(f), AbstractTiled)]


@pytest.mark.examples(4)
@pytest.mark.parametrize("name", each(scaled))
def test_rows_scaled(name):
    format, w = formats[name], normal(4, 128)
    stored = encode(format, w)
    factors = jnp.asarray([[1.0], [0.5], [1.25], [3.0]])
    found = jax.jit(format.with_rows_scaled)(stored, factors)
    if found is None:
        # All rows share the scale.
        assert stored["scale"].shape[0] == 1
        return
    np.testing.assert_array_equal(found["codes"], stored["codes"])
    layout = Layout(format).trimmed(stored, 128)
    old, new = (np.asarray(decode(layout, s)) for s in (stored, found))
    largest = np.max(np.abs(old), -1, keepdims=True)
    most = 0.01 * largest * np.asarray(factors)
    assert np.all(np.abs(new - old * np.asarray(factors)) <= most)
    np.testing.assert_array_equal(new[0], old[0])


# Scales of few bits could not tell such factors.
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "q4_k", eqq.Nested()], ids=str)
def test_others_stay(format):
    format = eqq.formats.as_format(format)
    stored = encode(format, normal(2, 256))
    assert format.with_rows_scaled(stored, jnp.ones((2, 1))) is None
