import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eqquant as eqq
from eqquant.formats import Layout

from ..helpers import normal
from .reference import rotation


# The largest power of two that divides the axis.
sizes = {576: 64, 1536: 128, 96: 32, 130: 2, 7: 1, 128: 128}


@pytest.mark.parametrize("k", sizes)
def test_rotate(k):
    format, x = eqq.Rotated(seed=3), normal(2, 5, k)
    r = rotation(k, format)
    assert format.size(k) == sizes[k]
    np.testing.assert_allclose(r @ r.T, np.eye(k), atol=1e-12)
    x = np.asarray(x)
    rotated, back = jax.jit(lambda x: (format.rotate(x), format.rotate_back(x)))(x)
    np.testing.assert_allclose(rotated, x @ r, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(back, x @ r.T, rtol=1e-5, atol=1e-5)
    gram, diagonal = x[0].T @ x[0], np.abs(x[1, 0])
    rotate_gram = jax.jit(format.rotate_gram, static_argnums=1)
    found = rotate_gram(gram, 2)
    np.testing.assert_allclose(found, r.T @ gram @ r, rtol=1e-4, atol=1e-4)
    found = rotate_gram(diagonal, 1)
    expected = np.diagonal(r.T @ np.diag(diagonal) @ r)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


# Files hold nothing of the signs but the seed.
@pytest.mark.parametrize(
    "seed, known",
    [
        (0, 0x090798E8DC419111),
        (1, 0xB3C57892BD402940),
        (2**64 - 1, 0x884C090CF7ADB292),
    ],
)
def test_signs_never_change(seed, known):
    first = eqq.Rotated(block=64, seed=seed).rotate_back(jnp.eye(64)[:1])[0]
    negative = np.signbit(first)
    assert sum(2**i for i in range(64) if negative[i]) == known


# What is stored is what the inner format stores, of the rotated matrix.
@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "inner", [eqq.Int8(), eqq.Nested(eqq.NF4(16), eqq.Int8(32)), eqq.formats.Q4_K()]
)
def test_stored(inner):
    format, w = eqq.Rotated(inner, 64, 5), normal(24, 576)
    q = eqq.quantize(w, format, axis=-1)
    plain = eqq.quantize(format.rotate(w), inner, axis=-1)
    stored = jax.tree.map(np.asarray, (q.stored, plain.stored))
    jax.tree.map(np.testing.assert_array_equal, *stored)
    assert (q.bits_per_weight, q.block_size) == (
        plain.bits_per_weight,
        plain.block_size,
    )
    assert pickle.loads(pickle.dumps(format)) == format
    assert Layout(format) == q.layout.preferred(1) or q.layout.row_axis == -1


def test_the_inner_format_may_be_a_name():
    assert eqq.Rotated("int8") == eqq.Rotated(eqq.Int8(), np.int64(128))  # pyright: ignore
    assert eqq.quantize(normal(64, 4), "rotated").format == eqq.Rotated(eqq.NF4(64))


@pytest.mark.parametrize("block", (0, 1, 3, 48, 2048, -2))
def test_bad_blocks(block):
    with pytest.raises(ValueError, match="`block` should be a power of two"):
        eqq.Rotated(eqq.NF4(), block)


def test_bad_arguments():
    for block in (64.0, True, None):
        with pytest.raises(TypeError, match="`block` should be an integer"):
            eqq.Rotated(eqq.NF4(), block)  # pyright: ignore
    with pytest.raises(TypeError, match="`seed` should be an integer"):
        eqq.Rotated(eqq.NF4(), seed=0.5)  # pyright: ignore
    for seed in (-1, 2**64):
        with pytest.raises(ValueError, match="`seed` should be at least 0"):
            eqq.Rotated(eqq.NF4(), seed=seed)
    with pytest.raises(ValueError, match="is rotated itself"):
        eqq.Rotated(eqq.Rotated())
    with pytest.raises(ValueError, match="stores -1, 0 and 1 only"):
        eqq.Rotated(eqq.RSRTernary())
    with pytest.raises(ValueError, match="should be formats with scales"):
        eqq.Nested(eqq.Rotated())  # pyright: ignore
