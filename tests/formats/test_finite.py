import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqquant as eqq

from ..helpers import native_formats, normal


# From 64 x 64 numbers, a maximum on CPU drops NaNs.
shape = (70, 130)
not_finite = st.sampled_from([np.nan, np.inf, -np.inf])
places = st.tuples(st.integers(0, shape[0] - 1), st.integers(0, shape[1] - 1))


@native_formats
@settings(max_examples=5)
@given(value=not_finite, place=places)
def test_concrete(format, value, place):
    w = normal(*shape).at[place].set(value)
    with pytest.raises(ValueError, match="`w` should be finite, but 1 of its 9100"):
        eqq.quantize(w, format)

    # Closed over, `w` is known when the function is traced.
    with pytest.raises(ValueError, match="`w` should be finite, but 1 of its 9100"):
        jax.jit(lambda x: x @ eqq.quantize(w, format))(normal(2, shape[0]))
    with pytest.raises(ValueError, match="`w` should be finite, but 1 of its 9100"):
        jax.vmap(lambda x: x @ eqq.quantize(w, format))(normal(2, shape[0]))


@jax.jit(static_argnums=1)
def decode_and_multiply(w, format):
    q = eqq.quantize(w, format, axis=-1)
    return q.dequantize(), q @ jnp.ones(shape[1], w.dtype)


@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
@settings(max_examples=12)
@given(value=not_finite, place=places)
def test_traced_narrow(dtype, value, place):
    assert_only_its_block(eqq.Int8(32), dtype, value, place)


def assert_only_its_block(format, dtype, value, place):
    i, j = place
    w = normal(*shape, dtype=dtype)
    clean, clean_y = map(np.asarray, decode_and_multiply(w, format))
    w = w.at[place].set(value)
    decoded, y = map(np.asarray, decode_and_multiply(w, format))
    size = format.block_size or shape[1]
    block = j // size
    assert np.all(np.isnan(decoded[i, block * size : (block + 1) * size]))
    assert np.isnan(y[i])
    nan = np.isnan(decoded)
    assert np.array_equal(decoded[~nan], clean[~nan])
    assert np.array_equal(y[~np.isnan(y)], clean_y[~np.isnan(y)])
    assert np.sum(np.any(nan, axis=1)) == np.sum(np.isnan(y)) == 1
    assert np.sum(nan[i]) <= size
