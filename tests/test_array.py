import operator
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq

from .helpers import formats, native_formats, normal, trees_equal


some_formats = pytest.mark.parametrize(
    "name", ("nf4", "int4-affine", "ternary-tensor", "nested")
)


def same(a, b):
    return isinstance(a, eqq.QuantizedArray) and trees_equal(a, b)


@pytest.mark.examples(3)
@native_formats
def test_pytree(format):
    q = eqq.quantize(normal(130, 5), format, activation="int8")
    leaves, treedef = jtu.tree_flatten(q)
    assert all(jnp.issubdtype(leaf.dtype, jnp.integer) for leaf in leaves)
    assert same(jtu.tree_unflatten(treedef, leaves), q)
    assert same(jax.jit(lambda q: q)(q), q)
    assert same(jax.device_put(q, jax.devices()[-1]), q)
    arrays, static = eqx.partition(q, eqx.is_array)
    assert same(eqx.combine(arrays, static), q)
    assert same(pickle.loads(pickle.dumps(q)), q)
    assert hash(treedef) == hash(jtu.tree_structure(jax.jit(lambda q: q)(q)))
    assert eqx.filter(q, eqx.is_inexact_array).dequantize is not None
    assert jtu.tree_leaves(eqx.filter(q, eqx.is_inexact_array)) == []


@native_formats
def test_transpose(format):
    q = eqq.quantize(normal(130, 5), format)
    assert q.T.shape == (5, 130)
    assert (q.axis, q.T.axis) == (-2, -1)
    assert same(q.T.T, q) and same(q.mT.mT, q)
    assert jtu.tree_leaves(q.T)[0] is jtu.tree_leaves(q)[0]
    np.testing.assert_array_equal(q.T.dequantize(), q.dequantize().T)


# Quantizing the transpose is transposing what was quantized.
@pytest.mark.examples(2)
@some_formats
def test_transpose_before(name):
    w, format = normal(130, 5), formats[name]
    assert same(eqq.quantize(w.T, format, axis=-1), eqq.quantize(w, format).T)


def test_transpose_of_stacks_and_vectors():
    q = eqq.quantize(normal(2, 3, 70, 5))
    assert q.mT.shape == (2, 3, 5, 70)
    assert same(q.mT.mT, q)
    np.testing.assert_array_equal(q.mT.dequantize(), q.dequantize().mT)
    vector = eqq.quantize(normal(70))
    assert same(vector.T, vector)


def test_transpose_as_a_method():
    q = eqq.quantize(normal(2, 3, 70, 5))
    w = q.dequantize()
    for axes in ((0, 1, 3, 2), (0, 1, -1, -2), ((0, 1, 3, 2),), ([0, 1, 3, 2],)):
        assert same(q.transpose(*axes), q.mT)
    for axes in ((), (3, 1, 0, 2), ((1, 0, 2, 3),), (0, 1, 2, 3)):
        np.testing.assert_array_equal(q.transpose(*axes), w.transpose(*axes))
    assert same(q.swapaxes(2, 3), q.mT) and same(q.swapaxes(-1, -2), q.mT)
    np.testing.assert_array_equal(q.swapaxes(0, -1), w.swapaxes(0, -1))
    matrix = q[0, 0]
    assert same(matrix.transpose(), matrix.T) and same(matrix.transpose(1, 0), matrix.T)
    for axes in ((2, 1), (1, 0, 2), (1,), (0, 0), (-1, -4)):
        with pytest.raises((ValueError, TypeError)):
            matrix.dequantize().transpose(*axes)
        with pytest.raises((ValueError, TypeError)):
            matrix.transpose(*axes)
    vector = eqq.quantize(normal(70))
    np.testing.assert_array_equal(vector.transpose(), vector.dequantize())


def test_at():
    q = eqq.quantize(normal(70, 5))
    w = q.dequantize()
    np.testing.assert_array_equal(q.at[3, 2].set(9.0), w.at[3, 2].set(9.0))
    np.testing.assert_array_equal(q.at[:, 1].multiply(2.0), w.at[:, 1].multiply(2.0))


binary = (
    operator.add,
    operator.sub,
    operator.mul,
    operator.truediv,
    operator.floordiv,
    operator.mod,
    operator.pow,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
)


@pytest.mark.examples(5)
@pytest.mark.parametrize("op", binary)
def test_arithmetic(op):
    q = eqq.quantize(abs(normal(70, 5)), eqq.Int8())
    w = q.dequantize()
    for other in (2.0, 3, np.full((70, 5), 2, np.float32), q):
        dense = other.dequantize() if other is q else other
        for y, expected in (
            (op(q, other), op(w, dense)),
            (op(other, q), op(dense, w)),
        ):
            assert isinstance(y, jax.Array)
            assert y.dtype == expected.dtype
            np.testing.assert_allclose(y, expected, rtol=1e-6, atol=1e-6)


def test_unary():
    q = eqq.quantize(normal(70, 5))
    for op in (operator.neg, operator.pos, operator.abs):
        np.testing.assert_array_equal(op(q), op(q.dequantize()))
    assert bool(eqq.quantize(jnp.ones((1, 1))))
    assert not bool(eqq.quantize(jnp.zeros((1, 1))))


def test_astype():
    w = normal(70, 5)
    q = eqq.quantize(w)
    narrow = q.astype(jnp.bfloat16)
    assert (q.dtype, narrow.dtype) == (jnp.float32, jnp.bfloat16)
    assert narrow.dequantize().dtype == jnp.bfloat16
    assert same(narrow.astype(jnp.float32), q)
    assert narrow.stored is q.stored or trees_equal(narrow.stored, q.stored)
    assert (jnp.ones((2, 70), jnp.int32) @ narrow).dtype == jnp.bfloat16
    # As of an ordinary array: float64 only where that is enabled.
    assert q.astype(float).dtype == w.astype(float).dtype == jnp.float32
    np.testing.assert_array_equal(
        narrow.dequantize(), q.dequantize().astype(jnp.bfloat16)
    )


@native_formats
def test_properties(format):
    w = normal(2, 130, 5, dtype=jnp.bfloat16)
    q = jax.eval_shape(lambda w: eqq.quantize(w, format), w)
    assert (q.shape, q.ndim, q.size, len(q)) == ((2, 130, 5), 3, 1300, 2)
    assert (q.dtype, q.axis, q.format) == (jnp.bfloat16, -2, format)
    assert q.block_size == format.block_size
    assert q.sharding is q.activation is None
    assert repr(q).startswith("QuantizedArray(bf16[2,130,5], ")
    assert repr(format) in repr(q)


def test_repr():
    q = eqq.quantize(normal(4096, 256), eqq.NF4(64))
    expected = "f32[4096,256], NF4(), axis=-2, 4.5 bits/weight, 0.59 MB"
    assert repr(q) == f"QuantizedArray({expected})"
    assert str(q) == eqx.tree_pformat(q) == repr(q)
    with_activation = eqq.quantize(normal(64, 64), "int8", activation="int8")
    assert "activation=Int8()" in repr(with_activation)
    # Of what stands in for arrays, too.
    assert repr(jax.eval_shape(lambda: q)) == repr(q)
    assert "QuantizedArray" in repr(eqx.filter(q, False))
    assert "QuantizedArray" in repr(jtu.tree_map(lambda _: True, q))


def test_scale():
    q = eqq.quantize(normal(130, 5), eqq.NF4(64))
    w = np.asarray(normal(130, 5)).T
    expected = [np.max(np.abs(w[:, i : i + 64]), axis=1) for i in (0, 64, 128)]
    assert q.scale.dtype == jnp.float32
    np.testing.assert_array_equal(q.scale, np.stack(expected, axis=1))


@pytest.mark.examples(3)
@native_formats
def test_scale_of_each_format(format):
    # Numbers that are their own scale, in every block and format.
    w = jnp.full((130, 5), 3.0)
    if isinstance(format, eqq.Rotated):
        w = format.rotate_back(w.T).T
        q, format = eqq.quantize(w, format), format.format
    else:
        q = eqq.quantize(w, format)
    blocks = 1 if format.block_size is None else -(-130 // format.block_size)
    whole = isinstance(format, eqq.Ternary) and format.scale == "tensor"
    assert q.scale.shape == (1 if whole else 5, blocks)
    largest = {eqq.Int8: 127, eqq.Int4: 7 if getattr(format, "symmetric", 0) else 15}
    largest[eqq.Square4] = 49
    expected = 3 / largest.get(type(format), 1)
    np.testing.assert_allclose(q.scale, jnp.full_like(q.scale, expected), rtol=1e-6)


def test_numpy_arrays_meet_it():
    q = eqq.quantize(normal(70, 5))
    x = np.ones((2, 70), np.float32)
    assert isinstance(x @ q, jax.Array)
    np.testing.assert_array_equal(x @ q, jnp.asarray(x) @ q)
    np.testing.assert_array_equal(q.T @ x.T, q.T @ jnp.asarray(x.T))
    assert isinstance(np.float32(2) * q, jax.Array)
    assert isinstance(np.ones((70, 5), np.float32) + q, jax.Array)


def test_delete():
    q = eqq.quantize(normal(70, 5))
    q.delete()
    assert all(a.is_deleted() for a in jtu.tree_leaves(q))


def test_no_argument_changes():
    w = np.asarray(normal(130, 5))
    before = w.copy()
    q = eqq.quantize(w)
    leaves = [np.asarray(a).copy() for a in jtu.tree_leaves(q)]
    q.T, q.astype(jnp.float16), q + 1.0, q[0], w.T @ q, q.dequantize()
    np.testing.assert_array_equal(w, before)
    for old, new in zip(leaves, jtu.tree_leaves(q)):
        np.testing.assert_array_equal(old, new)
    assert (q.dtype, q.axis) == (jnp.float32, -2)
    with pytest.raises(AttributeError):
        q.axis = -1


def test_format_is_a_value():
    assert eqq.NF4(64) == eqq.NF4(64) != eqq.NF4(32)
    assert hash(eqq.NF4(64)) == hash(eqq.NF4(64))
    assert eqq.Int8(scale_dtype="bfloat16") == eqq.Int8(scale_dtype=jnp.bfloat16)
    assert jtu.tree_leaves(eqq.Nested()) == []
    assert eqq.quantize(normal(64, 5), "nf4").format == eqq.NF4()
    assert eqq.quantize(normal(64, 5), "NF4").format == eqq.NF4()
    for name in ("nf4", "int8", "int4", "ternary", "binary", "nested"):
        assert type(eqq.quantize(normal(64, 5), name).format).__name__.lower() == name


# As `jax.device_get` and some checkpoints give them.
@pytest.mark.parametrize("activation", (None, "int8"))
def test_leaves_of_numpy(activation):
    q = eqq.quantize(normal(64, 128), "int8", activation=activation)
    on_host = jax.device_get(q)
    x = normal(3, 64, seed=1)
    for fn in (
        lambda q: x @ q,
        lambda q: q.T @ x.T,
        lambda q: q.T[jnp.array([1, 3])],
        lambda q: q.dequantize(),
        lambda q: eqq.tree_prepack({"w": q})["w"].dequantize(),
        lambda q: eqq.implicit(jnp.dot)(x, q),
        jax.jit(lambda q: x @ q),
    ):
        np.testing.assert_array_equal(fn(on_host), fn(q))
    assert repr(on_host) == repr(q)
    assert on_host.placement is None and not on_host.is_sharded
    on_host.delete()
