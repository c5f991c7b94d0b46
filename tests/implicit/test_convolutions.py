import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant import implicit, qconv

from ..helpers import formats, normal
from .same import assert_close, assert_same, assert_same_gradient


ohwi = lax.ConvDimensionNumbers((0, 3, 1, 2), (0, 3, 1, 2), (0, 3, 1, 2))
cases = {
    "plain": (dict(padding="SAME"), 8),
    "strides": (dict(padding="VALID", window_strides=(2, 1)), 8),
    "dilated": (dict(padding=((1, 1), (2, 0)), rhs_dilation=(2, 1)), 8),
    "transposed": (dict(padding=((2, 2), (2, 2)), lhs_dilation=(2, 2)), 8),
    "groups": (dict(padding="SAME", feature_group_count=3), 24),
}


def arguments(params):
    params = dict(params)
    return (params.pop("window_strides", (1, 1)), params.pop("padding")), params


# Of filters that are decoded at once, and in tiles: of 768 numbers, and of 86400.
@pytest.mark.examples(1)
@pytest.mark.parametrize("out, scale", ((12, 1), (150, 8)))
@pytest.mark.parametrize("case", cases)
def test_convolution(case, out, scale):
    params, channels = cases[case]
    positional, named = arguments(params)
    fn = lambda x, w: lax.conv_general_dilated(x, w, *positional, **named)
    q = eqq.quantize(normal(out, 8 * scale, 3, 3), "int8", axis=(1, 2, 3))
    x = normal(2, channels * scale, 7, 6, seed=1)
    assert_same(fn, x, q, packed=True, read=1)
    expected = fn(x, q.dequantize())
    assert_close(qconv(x, q, *positional, **named), expected)
    if scale == 1 or case in ("plain", "groups"):
        loss = lambda fn: lambda x, w: jnp.sum(jnp.sin(fn(x, w)))
        gradient = jax.jit(jax.grad(loss(implicit(fn))))(x, q)
        assert_close(gradient, jax.grad(loss(fn))(x, q.dequantize()))


@pytest.mark.usefixtures("unchecked")
def test_parameters_of_numpy():
    q = eqq.quantize(normal(12, 8, 3, 3), "int8", axis=(1, 2, 3))
    x = normal(2, 8, 7, 6, seed=1)
    params = (np.array([2, 1]), np.array([[1, 1], [2, 0]]), None, np.array([1, 2]))
    expected = lax.conv_general_dilated(x, q.dequantize(), *params)
    assert_close(qconv(x, q, *params), expected)


@pytest.mark.examples(3)
@pytest.mark.parametrize("name", ("nf4", "ternary-tensor", "nested"))
@pytest.mark.parametrize("axis", ((0, 2, 3), (1, 2, 3), (2, 3), 1, 0))
def test_axes(name, axis):
    q = eqq.quantize(normal(12, 8, 3, 3), formats[name], axis=axis)
    x = normal(2, 8, 7, 6, seed=1)
    assert_same(lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"), x, q)


# A filter whose input channels can be cut, for those of the output are in the blocks.
def test_tiles_of_inputs():
    q = eqq.quantize(normal(90, 100, 3, 3), "int8", axis=(0, 2, 3))
    x = normal(2, 100, 7, 6, seed=1)
    fn = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME")
    assert_same(fn, x, q, packed=True, read=1)
    tolerance = 1e-2
    assert_same(fn, x.astype(jnp.bfloat16), q.astype(jnp.bfloat16), tolerance=tolerance)


def test_layouts_and_ranks():
    q = eqq.quantize(normal(12, 3, 3, 8), axis=(1, 2, 3))
    fn = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=ohwi
    )
    assert_same(fn, normal(2, 7, 6, 8), q, packed=True, read=1)
    hwio = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    q = eqq.quantize(normal(3, 3, 8, 12), axis=(0, 1, 2))
    assert_same(hwio, normal(2, 7, 6, 8), q, packed=True, read=1)
    line = lambda x, w: lax.conv_general_dilated(x, w, (1,), "SAME")
    q = eqq.quantize(normal(12, 8, 3), axis=(1, 2))
    assert_same(line, normal(2, 8, 6), q, packed=True, read=1)
    # The input, which is not a filter.
    assert_same(line, eqq.quantize(normal(2, 8, 6), axis=1), normal(12, 8, 3))
    both = eqq.quantize(normal(2, 8, 6), axis=1)
    assert_same(line, both, q, read=1)


def test_batch_groups():
    q = eqq.quantize(normal(12, 8, 3, 3), axis=(1, 2, 3))
    fn = lambda x, w: lax.conv_general_dilated(
        x, w, (1, 1), "SAME", batch_group_count=2
    )
    assert_same(fn, normal(4, 8, 7, 6), q)


def test_qconv():
    q = eqq.quantize(normal(12, 8, 3, 3), "int8", axis=(1, 2, 3))
    x = normal(2, 8, 7, 6, seed=1)
    w = q.dequantize()
    expected = lax.conv_general_dilated(x, w, (1, 1), "SAME")
    assert_close(qconv(x, w, (1, 1), "SAME"), expected)
    assert_close(
        qconv(eqq.quantize(x, "int8", axis=1), w, (1, 1), "SAME").shape, (2, 12, 7, 6)
    )
    integers = (3 * x).astype(jnp.int32)
    y = qconv(integers, q, (1, 1), "SAME")
    assert y.dtype == q.dtype
    assert_close(y, qconv(integers.astype(jnp.float32), q, (1, 1), "SAME"))
    assert qconv(x.astype(jnp.bfloat16), q, (1, 1), "SAME").dtype == jnp.bfloat16
    batched = jax.vmap(lambda x: qconv(x[None], q, (1, 1), "SAME")[0])(x)
    assert_close(batched, expected)


# Tiles of a filter see parts of the input, which would match an input of any size.
@pytest.mark.parametrize("axis", ((0, 2, 3), (1, 2, 3)))
def test_sizes_that_do_not_match(axis):
    q = eqq.quantize(normal(90, 100, 3, 3), "int8", axis=axis)
    for channels in (99, 120):
        with pytest.raises(ValueError, match="feature dimension size"):
            qconv(normal(2, channels, 7, 6), q, (1, 1), "SAME")


@pytest.mark.examples(1)
@pytest.mark.optimized
@pytest.mark.parametrize("name", ("nf4", "int8", "nested"))
@pytest.mark.parametrize("out", (128, 512))
def test_temporaries(name, out):
    q = jax.eval_shape(
        lambda w: eqq.quantize(w, formats[name], axis=(1, 2, 3)),
        jax.ShapeDtypeStruct((out, 256, 3, 3), jnp.float32),
    )
    x = jax.ShapeDtypeStruct((1, 256, 4, 4), jnp.float32)
    fn = lambda x, w: qconv(x, w, (1, 1), "SAME")
    loss = lambda x, w: jnp.sum(jnp.sin(fn(x, w)))
    for f in (fn, jax.grad(loss)):
        compiled = jax.jit(f).lower(x, q).compile()
        temporary = compiled.memory_analysis().temp_size_in_bytes
        assert temporary <= 0.25 * 4 * out * 256 * 9


def test_gradient_inside():
    q = eqq.quantize(normal(12, 8, 3, 3), "int8", axis=(1, 2, 3))
    fn = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME")
    assert_same_gradient(fn, normal(2, 8, 7, 6), q)
