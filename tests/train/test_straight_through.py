import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant.train import straight_through

from ..formats.reference import round_trip
from ..helpers import main_formats, native_formats, normal
from .reference import is_inside, scales


@pytest.mark.examples(2)
@native_formats
def test_forward_is_what_is_stored(format):
    _check_forward(format, (3, 70, 5), -2)


@pytest.mark.examples(2)
@pytest.mark.parametrize("format", (eqq.NF4(64), eqq.Int8(), eqq.Ternary(48)))
@pytest.mark.parametrize("shape, axis", [((5, 130), -1), ((70,), -1)])
def test_forward_along_other_axes(format, shape, axis):
    _check_forward(format, shape, axis)


def _check_forward(format, shape, axis):
    w = normal(*shape)
    expected = eqq.quantize(w, format, axis=axis).dequantize()
    run = eqx.filter_jit(straight_through)
    assert np.array_equal(run(w, format, axis=axis), expected)
    if axis == -2 or len(shape) == 1:
        assert np.array_equal(straight_through(w, format), expected)


# A scale for each token or one for all of them; with a zero-point, unsigned codes.
@pytest.mark.examples(3)
@pytest.mark.parametrize("axis", (-1, (-3, -2, -1)))
@pytest.mark.parametrize("bits", (4, 8))
@pytest.mark.parametrize("symmetric", (True, False))
def test_activations(axis, bits, symmetric):
    x = normal(3, 7, 40) * jnp.arange(1.0, 8.0)[None, :, None] + 2
    if symmetric:
        format = eqq.Int8() if bits == 8 else eqq.Int4(None)
        low, first = -np.abs(x).max(axis, keepdims=True), 1 - 2 ** (bits - 1)
        scale, zero = low / first, 0
    else:
        format = eqq.Int(bits, None, offset="zero_point")
        low = np.minimum(np.min(x, axis, keepdims=True), 0)
        high = np.maximum(np.max(x, axis, keepdims=True), 0)
        scale, first = (high - low) / (2**bits - 1), 0
        zero = np.round(-low / scale)
    last = 2**bits - 1 if first == 0 else -first
    codes = np.clip(np.round(np.asarray(x) / scale) + zero, first, last)
    y, tangent = jax.jvp(lambda x: straight_through(x, format, axis=axis), (x,), (x,))
    # A few numbers half-way between two integers round the other way.
    near = np.isclose(y, (codes - zero) * scale, rtol=1e-5, atol=1e-5)
    assert near.mean() > 0.998
    assert np.array_equal(tangent, x)


@pytest.mark.examples(2)
@main_formats
def test_derivative_is_that_of_the_identity(format):
    _check_identity(format, jnp.float32)


@pytest.mark.examples(2)
@pytest.mark.parametrize("format", (eqq.NF4(64), eqq.Int8()))
@pytest.mark.parametrize("dtype", (jnp.bfloat16, jnp.float16))
def test_derivative_of_narrow_weights(format, dtype):
    _check_identity(format, dtype)


def _check_identity(format, dtype):
    w, v, c = (normal(70, 5, seed=i, dtype=dtype) for i in range(3))
    fn = lambda w: straight_through(w, format)
    y, tangent = jax.jvp(fn, (w,), (v,))
    assert y.dtype == dtype and y.shape == w.shape
    assert np.array_equal(tangent, v)
    y, pull = jax.vjp(fn, w)
    (cotangent,) = pull(c)
    assert cotangent.dtype == dtype and np.array_equal(cotangent, c)


# Of `sum(c * q(w) ** 3)` with `dq = dw`: the gradient `3 c q ** 2`, the product of the
# Hessian with `v` `6 c q v`.
@pytest.mark.examples(2)
@main_formats
def test_derivatives_of_a_function(format):
    w, v, c = (normal(5, 130, seed=i) for i in range(3))
    f = lambda w: jnp.sum(c * straight_through(w, format, axis=-1) ** 3)
    q = round_trip(w, format)
    gradient, product = jax.jit(lambda w, v: jax.jvp(jax.grad(f), (w,), (v,)))(w, v)
    np.testing.assert_allclose(gradient, 3 * c * q**2, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(product, 6 * c * q * v, rtol=1e-4, atol=1e-4)


@pytest.mark.examples(2)
@main_formats
def test_vmap(format):
    w = normal(3, 70, 5)
    fn = lambda w: straight_through(w, format)
    each = jnp.stack([fn(w[i]) for i in range(3)])
    assert np.array_equal(jax.vmap(fn)(w), each)
    gradients = jax.vmap(jax.grad(lambda w: jnp.sum(fn(w))))(w)
    assert np.array_equal(gradients, jnp.ones_like(w))


@pytest.mark.examples(1)
@main_formats
def test_clip(format):
    w, c = normal(7, 130), normal(7, 130, seed=1)
    fn = lambda w: straight_through(w, format, axis=-1, clip=True)
    got = jax.jit(jax.grad(lambda w: jnp.sum(c * fn(w))))(w)
    wide = np.asarray(w, np.float64)
    inside, margin = is_inside(wide, scales(wide, format), format)
    clear = margin > 0.02  # the ends of a block are there up to the rounding of scales
    np.testing.assert_array_equal(got[clear], np.where(inside, c, 0)[clear])
    # The largest of a block, which has the scale, is not beyond it.
    if not isinstance(format, eqq.Nested) and inside.all():
        np.testing.assert_array_equal(got, c)
    assert np.array_equal(fn(w), straight_through(w, format, axis=-1))
    _, tangent = jax.jvp(fn, (w,), (c,))
    np.testing.assert_array_equal(tangent, got)


@pytest.mark.examples(2)
@pytest.mark.parametrize("name", ("ternary", "binary", "ternary-tensor"))
def test_clip_reaches_some(name):
    w = normal(7, 130)
    format = eqq.Ternary(scale="tensor") if name == "ternary-tensor" else name
    gradient = jax.grad(lambda w: jnp.sum(straight_through(w, format, clip=True)))(w)
    # Of a normal distribution, 57.5 % are within the mean absolute value.
    assert abs(jnp.mean(gradient) - 0.575) < 0.05


number = 2000


def _at_random(w, format, **kwargs):
    draw = lambda key: straight_through(w, format, axis=-1, key=key, **kwargs)
    return np.asarray(jax.vmap(draw)(jr.split(jr.key(0), number)), np.float64)


@pytest.mark.examples(2)
@main_formats
def test_random_rounding_is_unbiased(format):
    w = normal(3, 66)
    draws = _at_random(w, format)
    wide = np.asarray(w, np.float64)
    inside, _ = is_inside(wide, scales(wide, format), format)
    low, high = draws.min(0), draws.max(0)
    # Two points, one on either side; and outside, the end.
    assert np.all((draws == low) | (draws == high))
    assert np.all((low <= wide + 1e-6) & (wide - 1e-6 <= high) | ~inside)
    assert np.all((low == high) | inside)
    deviation = np.sqrt(np.maximum((high - wide) * (wide - low), 0) / number)
    error = np.abs(draws.mean(0) - wide)
    # At 5.5 standard deviations. A point as rare as that may not have been drawn.
    rare = (high - low) == 0
    assert np.all((error <= 5.5 * deviation + 1e-6) | ~inside | rare)
    assert np.mean(rare & inside) < 0.1


@pytest.mark.examples(2)
@pytest.mark.parametrize("format", (eqq.Int8(), eqq.Int4(32), eqq.Ternary()))
def test_random_rounding_is_to_neighbours(format):
    w = normal(3, 66)
    wide = np.asarray(w, np.float64)
    scale = scales(wide, format).reshape(3, -1)
    scale = np.repeat(scale, -(-66 // scale.shape[1]) if scale.shape[1] == 1 else 32, 1)
    unit = wide / scale[:, :66]
    last = {eqq.Int8: 127, eqq.Int4: 7, eqq.Ternary: 1}[type(format)]
    draws = _at_random(w, format) / scale[:, :66]
    expected = np.clip([np.floor(unit), np.ceil(unit)], -last, last)
    near = np.minimum(*np.abs(draws - expected[:, None]))
    np.testing.assert_allclose(near, 0, atol=1e-4)
    assert np.mean(draws.std(0) > 0) > 0.4


def test_random_rounding_of_points_and_of_dtypes():
    key = jr.key(0)
    points = eqq.quantize(normal(64, 5), "int8").dequantize()
    got = straight_through(points, "int8", key=key)
    np.testing.assert_allclose(got, points, rtol=1e-5)
    for dtype in (jnp.bfloat16, jnp.float16):
        w = normal(64, 5, dtype=dtype)
        fn = lambda w: straight_through(w, "nf4", key=key)
        assert fn(w).dtype == dtype
        assert np.array_equal(jax.vjp(fn, w)[1](w)[0], w)
    assert not np.array_equal(fn(w), straight_through(w, "nf4", key=jr.key(1)))


def test_not_finite_becomes_nan():
    w = normal(2, 128).at[0, 3].set(jnp.inf)
    for key in (None, jr.key(0)):
        y = straight_through(w, eqq.NF4(64), axis=-1, key=key)
        assert jnp.isnan(y[0, :64]).all() and jnp.isfinite(y[0, 64:]).all()
        assert jnp.isfinite(y[1]).all()


def test_zeros():
    for format in ("nf4", "int8", "ternary"):
        for key in (None, jr.key(0)):
            fn = lambda w: straight_through(w, format, clip=True, key=key)
            y, tangent = jax.jvp(fn, (jnp.zeros((16, 3)),), (jnp.ones((16, 3)),))
            assert not y.any() and tangent.all()


def test_convolution():
    w = normal(6, 4, 3, 3)
    axis = (-3, -2, -1)
    y = straight_through(w, "int4", axis=axis, clip=True)
    assert np.array_equal(y, eqq.quantize(w, "int4", axis=axis).dequantize())


def test_errors():
    w = normal(16, 4)
    with pytest.raises(ValueError, match="`format` should be one that rounds.*0 and 1"):
        straight_through(w, eqq.RSRBinary())
    with pytest.raises(TypeError, match="`w` should be a floating-point.*int32"):
        straight_through(jnp.arange(4), "int8")
    with pytest.raises(TypeError, match="Quantized"):
        straight_through(eqq.quantize(w), "int8")
    with pytest.raises(ValueError, match="`w` should have at least one axis"):
        straight_through(jnp.array(1.0), "int8")
    with pytest.raises(ValueError, match="Unknown format name 'int9'"):
        straight_through(w, "int9")


class Halves(eqq.AbstractFormat):
    """Rounds to halves, without a scale."""

    block_size = None
    bits = 8.0

    def encode(self, w, scale=None):
        return {"codes": jnp.round(2 * w.astype(jnp.float32)).astype(jnp.int8)}

    def decode(self, stored, tail):
        return stored["codes"].astype(jnp.float32) / 2

    def shape(self, stored, tail):
        return stored["codes"].shape


def test_formats_without_a_grid():
    w = normal(16, 4)
    fn = lambda w: straight_through(w, Halves())
    y, tangent = jax.jvp(fn, (w,), (w,))
    np.testing.assert_allclose(y, np.round(2 * np.asarray(w)) / 2)
    assert np.array_equal(tangent, w)
    for kwargs in (dict(clip=True), dict(key=jr.key(0))):
        with pytest.raises(
            ValueError, match="`format` should be a scale times.*Halves"
        ):
            straight_through(w, Halves(), **kwargs)
