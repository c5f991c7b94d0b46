import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import eqquant as eqq

from .helpers import formats, native_formats, normal, trees_equal


some_formats = pytest.mark.parametrize(
    "name", ("nf4", "int4-affine", "ternary-tensor", "nested")
)


def same(a, b):
    return isinstance(a, eqq.QuantizedArray) and trees_equal(a, b)


# Matrices that were quantized one by one, or all at once.
@pytest.mark.examples(2)
@native_formats
def test_stack(format):
    w = normal(3, 130, 5)
    each = [eqq.quantize(w[i], format) for i in range(3)]
    q = jtu.tree_map(lambda *leaves: jnp.stack(leaves), *each)
    assert same(jax.jit(jax.vmap(lambda w: eqq.quantize(w, format)))(w), q)
    assert q.shape == (3, 130, 5) and len(q) == 3
    assert all(same(q[i], each[i]) for i in range(3))
    assert all(same(jtu.tree_map(lambda a: a[i], q), each[i]) for i in range(3))
    np.testing.assert_array_equal(q.dequantize()[1], each[1].dequantize())


@pytest.mark.examples(1)
@some_formats
def test_stack_is_mapped_and_scanned(name):
    w, format = normal(3, 130, 5), formats[name]
    q = eqq.quantize(w, format)
    assert all(same(a, b) for a, b in zip(q, [q[0], q[1], q[2]], strict=True))
    assert same(q[1:], jtu.tree_map(lambda a: a[1:], q)) and q[1:].shape == (2, 130, 5)
    assert same(jax.vmap(lambda q: q)(q), q)
    assert same(jax.lax.map(lambda w: eqq.quantize(w, format), w), q)
    _, scanned = jax.lax.scan(lambda carry, q: (carry, q.mT.mT), None, q)
    assert same(scanned, q)


def test_stack_in_the_middle():
    q = eqq.quantize(normal(2, 3, 70, 5))
    w = q.dequantize()
    for index in (1, -1, (1, 2), (0, slice(None)), (slice(None), 1), np.int32(1)):
        assert isinstance(q[index], eqq.QuantizedArray)
        np.testing.assert_array_equal(q[index].dequantize(), w[index])
    ids = jnp.array([1, 0, 1])
    np.testing.assert_array_equal(q[ids].dequantize(), w[ids])
    np.testing.assert_array_equal(q[jnp.array(1)].dequantize(), w[1])
    picked = jax.jit(lambda q, i: q[i, 1])(q, 1)
    assert same(picked, q[1, 1])
    moved = jtu.tree_map(lambda a: jnp.swapaxes(a, 0, 1), q)
    np.testing.assert_array_equal(moved.dequantize(), jnp.swapaxes(w, 0, 1))
    mapped = jax.vmap(lambda q: q, in_axes=1, out_axes=0)(q)
    assert same(mapped, moved)


indices = st.sampled_from(
    [
        0,
        -1,
        slice(None),
        slice(1, 60, 7),
        (3, 2),
        (3, slice(1, 3)),
        (slice(None), 2),
        (slice(2), slice(1, 3)),
        (..., 0),
        (None, 3),
        None,
        Ellipsis,
        np.int64(3),
        np.array([3, 0, 3]),
        np.array([[3, 0], [1, 1]]),
        np.array([True, False] * 35),
        (np.array([1, 2]), np.array([0, 4])),
        (),
    ]
)


@pytest.mark.examples(1)
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("name", ("nf4", "ternary-tensor"))
@settings(max_examples=18)
@given(index=indices)
def test_index_of_a_matrix(name, axis, index):
    w = normal(70, 70)
    q = eqq.quantize(w, formats[name], axis=axis)
    picked = q[index]
    assert isinstance(picked, jax.Array)
    np.testing.assert_array_equal(picked, q.dequantize()[index])


@pytest.mark.examples(1)
@some_formats
def test_index_of_rows(name):
    q = eqq.quantize(normal(9, 130), formats[name], axis=-1)
    w = q.dequantize()
    ids = jnp.array([[3, 0, 8], [3, 3, -1]])
    np.testing.assert_array_equal(jax.jit(lambda q, ids: q[ids])(q, ids), w[ids])
    np.testing.assert_array_equal(q[2], w[2])
    np.testing.assert_array_equal(jnp.stack(list(q)), w)
    np.testing.assert_array_equal(jax.vmap(lambda i: q[i])(ids[0]), w[ids[0]])


def test_index_of_a_vector():
    q = eqq.quantize(normal(70))
    np.testing.assert_array_equal(q[3], q.dequantize()[3])
    np.testing.assert_array_equal(q[1:5], q.dequantize()[1:5])
    assert len(q) == 70 and len(list(q)) == 70


def test_index_of_several_contracted_axes():
    q = eqq.quantize(normal(5, 4, 3, 3), axis=(-3, -2, -1))
    w = q.dequantize()
    np.testing.assert_array_equal(q[2].dequantize(), w[2])
    np.testing.assert_array_equal(q[2, 1], w[2, 1])
    stack = eqq.quantize(normal(2, 5, 4, 3, 3), axis=(-3, -2, -1))
    assert same(stack[1], eqq.quantize(normal(2, 5, 4, 3, 3)[1], axis=(-3, -2, -1)))


def test_index_out_of_range():
    # As of any array in JAX, which takes the nearest.
    for q in (eqq.quantize(normal(5, 70), axis=-1), eqq.quantize(normal(70, 5))):
        w = q.dequantize()
        for index in (99, -99, (2, 99), np.array([1, 99, -99])):
            np.testing.assert_array_equal(q[index], w[index])
        with pytest.raises(IndexError, match="Too many indices"):
            q[0, 0, 0]


def test_index_by_masks():
    q = eqq.quantize(normal(5, 5, 5))
    w = q.dequantize()
    one, two = np.arange(5) > 2, np.eye(5) == 1
    for index in (one, two, w > 0, True, (0, one), (one, 0), (slice(None), two)):
        picked = q[index]
        if isinstance(picked, eqq.QuantizedArray):
            picked = picked.dequantize()
        np.testing.assert_array_equal(picked, w[index])
