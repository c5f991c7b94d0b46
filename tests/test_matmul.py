import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqquant as eqq
import eqquant.kernels._table as table

from .helpers import error, formats, main_formats, native_formats, normal


some_formats = pytest.mark.parametrize(
    "name", ("nf4", "int4-affine", "ternary-tensor", "nested")
)
dtypes = st.sampled_from(
    [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int8, jnp.int32, bool]
)


def operand(shape, dtype):
    x = 3 * np.random.default_rng(1).standard_normal(shape)
    if dtype == jnp.complex64:
        x = x + 1j * np.random.default_rng(2).standard_normal(shape)
    return jnp.asarray(np.asarray(x).astype(dtype))


def weight(q):
    """What products with `q` are products with, in float64."""
    return np.asarray(q.astype(jnp.float32).dequantize(), np.float64)


def assert_product(y, x, w, bound=2e-6):
    """`y` is `x @ w` of shapes, and within errors, as should be. One of `x` and `w` is
    quantized."""
    x, q = (w, x) if isinstance(x, eqq.QuantizedArray) else (x, w)
    assert isinstance(y, jax.Array)
    inexact = jnp.issubdtype(x.dtype, jnp.inexact)
    assert y.dtype == (x.dtype if inexact else q.dtype)
    bound = bound + float(jnp.finfo(y.dtype).eps)
    dense = weight(q)
    for y, x in zip(_parts(y), _parts(x)):
        operands = (x, dense) if q is w else (dense, x)
        assert y.shape == np.matmul(*operands).shape
        assert error(y, *operands) < bound


def _parts(x):
    x = np.asarray(x)
    return (x.real, x.imag) if np.iscomplexobj(x) else (x.astype(np.float64),)


@pytest.mark.examples(1)
@native_formats
@settings(max_examples=5)
@given(
    axis=st.sampled_from([-1, -2]),
    left=st.booleans(),
    rows=st.sampled_from([(), (5,), (2, 3)]),
    dtype=dtypes,
)
def test_matrix(format, axis, left, rows, dtype):
    q = eqq.quantize(normal(130, 7, dtype=jnp.bfloat16), format, axis=axis)
    if left:
        q = q.T
        # `(*rows[:-1], 130, rows[-1])`, or `(130,)`.
        x = operand((*rows[:-1], 130, *rows[-1:]), dtype)
        assert_product(q @ x, q, x)
    else:
        x = operand((*rows, 130), dtype)
        assert_product(x @ q, x, q)


@pytest.mark.examples(1)
@some_formats
@settings(max_examples=5)
@given(
    lead=st.sampled_from([(3,), (2, 1), (1, 3)]),
    rows=st.sampled_from([(), (4,), (3, 4), (1, 4), (2, 1, 4), (5, 1, 1, 4)]),
    axis=st.sampled_from([-1, -2]),
    left=st.booleans(),
)
def test_stack(name, lead, rows, axis, left):
    q = eqq.quantize(normal(*lead, 70, 5), formats[name], axis=axis)
    if left:
        x = operand((*rows[:-1], 5, *rows[-1:]), jnp.float32)
        assert_product(q @ x, q, x)
    else:
        x = operand((*rows, 70), jnp.float32)
        assert_product(x @ q, x, q)


@pytest.mark.examples(1)
@some_formats
def test_vector(name):
    q = eqq.quantize(normal(130), formats[name])
    for shape in ((130,), (2, 3, 130)):
        x = operand(shape, jnp.float32)
        assert_product(x @ q, x, q)
    for shape in ((130,), (2, 130, 3)):
        x = operand(shape, jnp.float32)
        assert_product(q @ x, q, x)


@pytest.mark.examples(2)
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("shape", ((0, 5), (5, 0), (0, 16, 32)))
@pytest.mark.parametrize("name", ("nf4", "ternary-tensor"))
def test_empty(name, shape, axis):
    q = eqq.quantize(normal(*shape), formats[name], axis=axis)
    *_, k, n = shape
    for m in (0, 3):
        x = operand((m, k), jnp.float32)
        assert_product(x @ q, x, q)
        assert_product(q.mT @ x.T, q.mT, x.T)
    gradient = jax.grad(lambda x: jnp.sum(x @ q))(operand((3, k), jnp.float32))
    expected = jnp.ones((*shape[:-2], 3, n)) @ q.dequantize().mT
    expected = expected.sum(tuple(range(len(shape) - 2)))
    np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-5)


# Large enough for the reference product to go over the weight in several steps, the
# last of which is a short one.
@pytest.mark.examples(1)
@main_formats
def test_large(format):
    q = eqq.quantize(normal(601, 699), format, axis=-1)
    along, across = operand((3, 699), jnp.float32), operand((3, 601), jnp.float32)
    assert_product(eqq.qmatmul(along, q.T, kernel="reference"), along, q.T)
    assert_product(eqq.qmatmul(across, q, kernel="reference"), across, q)


@pytest.mark.examples(1)
@some_formats
def test_large_stack(name):
    q = eqq.quantize(normal(3, 301, 299), formats[name])
    x = operand((3, 2, 301), jnp.bfloat16)
    assert_product(eqq.qmatmul(x, q, kernel="reference"), x, q)
    x = operand((3, 299, 2), jnp.bfloat16)
    assert_product(eqq.qmatmul(q, x, kernel="reference"), q, x)


def test_zeros_of_x_give_zeros():
    q = eqq.quantize(normal(130, 7))
    assert not np.any(jnp.zeros((3, 130)) @ q)
    assert not np.any(jnp.zeros((3, 7)) @ q.T)


# Where the product contracts an axis, or several, other than those of the blocks.
@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "axis, dtype",
    (
        (0, jnp.float32),
        ((0, 1), jnp.bfloat16),
        ((-2, -1), jnp.int32),
        ((0, 2), jnp.float32),
        ((0, 1, 2), jnp.bfloat16),
    ),
)
def test_other_axes(axis, dtype):
    q = eqq.quantize(normal(4, 70, 5), axis=axis)
    x = operand((3, 70), dtype)
    assert_product(x @ q, x, q)
    x = operand((5, 3), dtype)
    assert_product(q @ x, q, x)


def test_both_quantized():
    a = eqq.quantize(normal(3, 70), axis=-1)
    b = eqq.quantize(normal(70, 5, seed=1), "int8")
    assert_product(a @ b, a.dequantize(), b)
    assert_product(eqq.qmatmul(a, b), a.dequantize(), b)


def test_integer_operands_have_the_dtype_of_the_weight():
    q = eqq.quantize(normal(130, 7), "int8")
    x = operand((3, 130), jnp.int32)
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16):
        y = x @ q.astype(dtype)
        assert y.dtype == dtype
        assert_product(y, x, q.astype(dtype))


# Activations are rounded row by row, each over the whole of what the product contracts.
@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "name, axis, activation",
    (("nf4", -1, "int8"), ("int8", -2, "int8"), ("int8", -1, eqq.Int8(32))),
)
def test_activation(name, axis, activation):
    w = normal(130, 7)
    q = eqq.quantize(w, formats[name], axis=axis, activation=activation)
    x = operand((2, 3, 130), jnp.float32)
    rounded = eqq.quantize(x, activation, axis=-1).dequantize()
    assert_product(x @ q, rounded, q)
    assert_product(q.T @ x.mT, q.T, rounded.mT)
    assert np.any((x @ q) != x @ eqq.quantize(w, formats[name], axis=axis))


@pytest.mark.parametrize("value", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("activation", (None, "int8"))
def test_rows_that_are_not_finite(value, activation):
    q = eqq.quantize(normal(130, 7), "int8", activation=activation)
    x = operand((5, 130), jnp.float32)
    y = x.at[3, 70].set(value) @ q
    assert not np.any(np.isfinite(y[3]))
    rest = np.array([0, 1, 2, 4])
    np.testing.assert_array_equal(y[rest], (x @ q)[rest])


# A kernel of low precision is not for those who ask for a high one, by whatever name.
@pytest.mark.parametrize("precision", ("highest", "float32", "F32_F32_F32"))
def test_names_of_precision(monkeypatch, precision):
    monkeypatch.setattr(table, "_table", [])
    monkeypatch.setattr(table, "_chosen", set())

    @eqq.register_kernel("matmul", eqq.NF4, error=1e-2)
    def zeros(x, stored, problem):
        return jnp.zeros((x.shape[0], problem.n), x.dtype)

    # Of shapes that no other test has, since these are compiled with that kernel.
    q = eqq.quantize(normal(77, 3))
    x = operand((2, 77), jnp.float32)
    with jax.default_matmul_precision("default"):
        assert not np.any(x @ q)
    with jax.default_matmul_precision(precision):
        assert_product(x @ q, x, q)


@pytest.mark.parametrize(
    "left, right", (((3, 4), (5, 6)), ((4,), (5,)), ((2, 5), (2, 3, 4, 5)))
)
def test_sizes_that_differ(left, right):
    x, w = normal(*left), normal(*right)
    q = eqq.quantize(w)
    with pytest.raises(ValueError, match=f"size {left[-1]} with one of size"):
        x @ q
    with pytest.raises(ValueError, match=f"size {right[-1]} with one of size"):
        q @ (x if q.ndim == 1 else w)
