"""Formats that search for scales, encoded by the native library: bit for bit what their
`encode` finds, compiled by XLA."""

import functools as ft

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import eqquant as eqq
import eqquant.kernels.native._library as library
from eqquant._array import _quantize
from eqquant.formats import AbstractK, IQ4_NL, Q4_0, Q4_K, Q6_K, Trellis
from eqquant.interop._converting import _encode as _converting
from eqquant.kernels import encoder, tile_encoder

from ..formats.test_trellis import fed, loss_of
from ..helpers import encode, formats, normal


pytestmark = pytest.mark.skipif(
    library.missing() is not None, reason="there is no native library here"
)

_searched = {
    name: format
    for name, format in formats.items()
    if isinstance(format, AbstractK | IQ4_NL | Trellis)
}
over_searched = pytest.mark.parametrize("name", _searched)
_of_blocks = [name for name in _searched if not name.startswith("trellis")]


def _numbers(n, k):
    """Numbers whose rows are of all sizes, with ties, zeros of both signs, subnormal
    numbers, constant blocks, and ends that are not further from zero than 256."""
    rng = np.random.default_rng(0)
    w = rng.standard_t(3, (n, k)) * 10.0 ** rng.integers(-45, 2, (n, 1))
    w[::7] = rng.integers(-8, 9, w[::7].shape) / 2
    w[1::7], w[2::14] = 0.0, -0.0
    w[3::7], w[4::14] = np.abs(w[3::7]), -np.abs(w[4::14])
    w[5::14] = 0.37
    w[6::14, ::3] = 1e-39
    w[13::14] *= rng.integers(0, 2, w[13::14].shape)
    w[:, :32] *= rng.integers(0, 2, (n, 32))
    return np.clip(w, -256, 256).astype(np.float32)


@ft.cache
def _expected(name):
    w = _numbers(131, 768)
    return w, jax.tree.map(np.asarray, encode(_searched[name], w))


@ft.partial(jax.jit, static_argnums=(0, 2))
def _found(format, w, across):
    found = encoder(format, w.dtype, across)
    assert found is not None
    return found(format, w)


def _check(format, w, expected):
    for across in (False, True):
        found = _found(format, jnp.asarray(w.swapaxes(-1, -2) if across else w), across)
        assert found.keys() == expected.keys()
        for part, a in found.items():
            assert a.dtype == expected[part].dtype
            np.testing.assert_array_equal(a, expected[part])


@pytest.mark.examples(3)
@over_searched
def test_strange_numbers(name):
    _check(_searched[name], *_expected(name))


# Rows and blocks are encoded alone.
@pytest.mark.examples(4)
@pytest.mark.parametrize("name", _of_blocks)
@pytest.mark.parametrize("shape", [(1, 256), (7, 512), (64, 256), (2, 3, 768)], ids=str)
def test_shapes(name, shape):
    format = _searched[name]
    w, stored = _expected(name)
    *lead, n, k = shape
    rows = np.random.default_rng(n).choice(len(w), (*lead, n))
    sizes = {part: a.shape[-1] * k // w.shape[-1] for part, a in stored.items()}
    expected = {part: a[rows][..., : sizes[part]] for part, a in stored.items()}
    _check(format, w[rows][..., :k], expected)


@pytest.mark.examples(4)
@over_searched
@pytest.mark.parametrize("k", [1, 31, 33, 300, 767])
def test_last_block(name, k):
    w = normal(5, k)
    _check(_searched[name], np.asarray(w), encode(_searched[name], w))


@pytest.mark.examples(2)
@over_searched
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_dtypes(name, dtype):
    format = _searched[name]
    w = _numbers(67, 256).astype(dtype)
    _check(format, w, encode(format, w.astype(np.float32)))


# Of all bits, and of as few states as there can be and of more.
@pytest.mark.examples(1)
@pytest.mark.parametrize("k", [300, 512, 32])
@pytest.mark.parametrize("states", [8, 9, 11])
@pytest.mark.parametrize("bits", range(1, 9))
def test_trellises(bits, states, k):
    format, w = Trellis(bits, states=states), _numbers(19, k)
    _check(format, w, encode(format, w))


def _quantized_by_xla(monkeypatch, w, format, axis):
    with monkeypatch.context() as patch:
        patch.setenv("EQQUANT_NATIVE", "0")
        assert encoder(Q4_K(), jnp.float32, across=True) is None
        return eqq.quantize(w, format, axis=axis)


@pytest.fixture
def asked(monkeypatch):
    """What `quantize` asks for, and whether it is given a function."""
    asked = []

    def asking(format, dtype, across):
        found = encoder(format, dtype, across)
        asked.append((format, across, found is not None))
        return found

    monkeypatch.setattr(_quantize, "encoder", asking)
    return asked


@pytest.mark.parametrize(
    "shape, axis, across",
    [
        ((300, 70), -2, True),
        ((70, 300), -1, False),
        ((2, 300, 33), -2, True),
        ((300, 2, 33), -3, False),
        ((20, 30, 9), (-3, -2), False),
    ],
)
def test_quantize(monkeypatch, asked, shape, axis, across):
    w, format = normal(*shape), Q6_K()
    q = eqq.quantize(w, format, axis=axis)
    assert asked == [(format, across, True)]
    expected = _quantized_by_xla(monkeypatch, w, format, axis)
    assert asked[1:] == [(format, across, False)]
    assert q.layout == expected.layout and q.stored.keys() == {"blocks"}
    np.testing.assert_array_equal(q.stored["blocks"], expected.stored["blocks"])


def test_left_to_xla(asked):
    # Vectors, what is traced, and large numbers.
    eqq.quantize(normal(300), Q6_K())
    jax.jit(lambda w: eqq.quantize(w, Q6_K()))(normal(256, 3))
    eqq.quantize(300 * normal(256, 3), Q6_K())
    assert asked == []
    eqq.quantize(normal(256, 3), Q4_0())
    assert asked == [(Q4_0(), True, False)]


def test_convert(monkeypatch):
    given = []

    def giving(format, dtype, across):
        given.append(encoder(format, dtype, across))
        return given[-1]

    monkeypatch.setattr(_converting, "encoder", giving)
    w = np.asarray(normal(300, 40))
    q, _ = _converting.encode(w, Q4_K(), -2, lambda share: None)
    assert given == [encoder(Q4_K(), jnp.float32, across=False)] != [None]
    expected = eqq.quantize(w, Q4_K())
    np.testing.assert_array_equal(q.stored["blocks"].T, expected.stored["blocks"])


def test_known_numbers_of_a_traced_function():
    w, x = normal(256, 8), normal(3, 256)
    expected = eqq.quantize(w, Q4_K())

    def f(x):
        q = eqq.quantize(w, Q4_K())
        return q.stored["blocks"], x.sum()

    assert "ffi_call" not in str(jax.make_jaxpr(f)(x))
    np.testing.assert_array_equal(jax.jit(f)(x)[0], expected.stored["blocks"])


# With feedback, all is computed in float32: paths are as good, if not the same.
@pytest.mark.examples(1)
@pytest.mark.parametrize("k", (256, 100))
@pytest.mark.parametrize(
    "bits, states", [(1, 8), (2, 8), (2, 10), (3, 9), (4, 8), (6, 8), (8, 9)]
)
def test_tiles_with_feedback(bits, states, k):
    format = Trellis(bits, states=states, scale_dtype=jnp.float32)
    w, target, lower, weights = of_tile = fed(k)
    args = jnp.asarray(w), target, jnp.ones((len(w), 1)), lower, weights
    native = tile_encoder(format)
    assert native is not None
    found = jax.jit(ft.partial(native, format))(*args)
    wanted = jax.jit(format.nearest_tile)(*args)
    assert found.shape == wanted.shape and found.dtype == wanted.dtype
    numbers = [np.asarray(format.points(codes))[:, :k] for codes in (found, wanted)]
    new, old = (loss_of(a, *of_tile) for a in numbers)
    np.testing.assert_allclose(new, old, rtol=0.1)
    assert abs(np.sum(new) / np.sum(old) - 1) < 0.03


def test_tiles_with_feedback_of_no_rows():
    format = Trellis(2, states=8)
    none, square = jnp.zeros((0, 64)), jnp.zeros((64, 64))
    native = tile_encoder(format)
    assert native is not None
    found = jax.jit(ft.partial(native, format))(
        none, none, jnp.zeros((0, 1)), square, jnp.ones(64)
    )
    assert found.shape == (0, 4)
