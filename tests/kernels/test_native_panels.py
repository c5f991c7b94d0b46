"""Weights whose rows lie in panels of 64 in memory."""

import dataclasses

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import eqquant as eqq
import eqquant.formats as eqf
from eqquant._array import _exported

from ..helpers import error, normal
from .levels import available


pytestmark = pytest.mark.skipif("avx512" not in available, reason="needs AVX512")

formats = (
    *(eqf.Q4_0(), eqf.Q8_0(), eqf.Q4_K(), eqf.Q2_K(), eqf.Q3_K(), eqf.Q5_1()),
    *(eqq.Int4(), eqq.Int8(), eqq.NF4(), eqf.FP8(), eqf.NVFP4(), eqf.MXFP4()),
    *(eqf.Int(3, 48, "zero_point"), eqf.Int(8, 32, "minimum")),
)
all_formats = pytest.mark.parametrize("format", formats, ids=str)


def in_panels(*shape, format, axis=-1):
    """An array and the same with its rows in panels."""
    q = eqq.quantize(normal(*shape), format, axis=axis)
    p = eqq.tree_prepack(q)
    assert p.layout.panels
    return q, p


@pytest.mark.examples(4)
@all_formats
def test_order(format):
    # Element `(j, i)` of what is stored is in panel `i // 64`.
    q, p = in_panels(192, 96, format=format)
    for name, a in jtu.tree_leaves_with_path(q.stored):
        b = dict(jtu.tree_leaves_with_path(p.stored))[name]
        assert a.dtype == b.dtype
        if a.shape[-1] == 1:
            assert np.array_equal(a, b)
        else:
            m, n = a.shape
            panels = np.asarray(a).reshape(m, n // 64, 64).transpose(1, 0, 2)
            assert b.ndim == 1 and np.array_equal(b, panels.ravel())
    assert np.array_equal(p.dequantize(), q.dequantize())
    assert equal(eqq.tree_prepack(p, platform="cpu"), q)


def equal(a, b):
    same = jtu.tree_structure(a) == jtu.tree_structure(b)
    return same and all(map(np.array_equal, jtu.tree_leaves(a), jtu.tree_leaves(b)))


@pytest.mark.examples(2)
@all_formats
@pytest.mark.parametrize("level", available)
def test_products(format, level, monkeypatch):
    q, p = in_panels(192, 416, format=format)
    monkeypatch.setenv("EQQUANT_NATIVE_LEVEL", level)
    w = np.asarray(q.dequantize(), np.float64)
    for rows in (1, 2, 5, 16, 40):
        x, u = normal(rows, 416, seed=rows), normal(rows, 192, seed=rows)
        bound = eqq.explain(x, p.T).error
        product = jax.jit(lambda x, w: x @ w)
        assert error(product(x, p.T), x, w.T) < bound
        assert error(product(u, p), u, w) < eqq.explain(u, p).error


# Each kernel that reads panels gives what it gives of rows side by side.
@pytest.mark.examples(12)
@pytest.mark.parametrize("rows", (1, 9))
@pytest.mark.parametrize(
    "kernel",
    (
        *("native_decoded", "native_decoded_integers", "native_few_integers"),
        "native_decoded_bfloat16",
    ),
)
@pytest.mark.parametrize(
    "format", (eqf.Q4_0(), eqf.Q4_K(), eqf.Int(8, 32, "minimum")), ids=str
)
def test_same_as_side_by_side(format, kernel, rows):
    if kernel == "native_decoded_bfloat16" and (
        rows == 1 or "avx512_bf16" not in available
    ):
        return
    q, p = in_panels(640, 512, format=format)
    x = normal(rows, 512, seed=1)
    multiply = lambda q: np.asarray(eqq.qmatmul(x, q.T, kernel=kernel))
    np.testing.assert_allclose(multiply(p), multiply(q), rtol=1e-5, atol=1e-4)


def test_what_is_laid_out_again():
    _, p = in_panels(512, 512, format=eqq.Int4())
    x = normal(1, 512)
    assert eqq.explain(x, p.T).kernel in ("native_few_integers", "native_decoded")
    text = jax.jit(lambda x, p: x @ p.T).lower(x, p).as_text()
    assert "in_panels = true" in text and "stablehlo.transpose" not in text
    # It is told where that is not so.
    told = "Lays the rows of the weight side by side first."
    assert told not in " ".join(str(eqq.explain(x, p.T)).split())
    assert told in " ".join(str(eqq.explain(normal(256, 512), p)).split())


class Mine(eqq.NF4):
    """A format for which a kernel is registered outside of the package."""


def test_other_kernels_get_rows_side_by_side():
    seen = []

    @eqq.register_kernel("matmul", Mine)
    def mine(x, stored, problem):
        seen.append((problem.layout.panels, stored["codes"].shape))
        return (x @ problem.decode(stored).T).astype(x.dtype)

    q, p = in_panels(128, 64, format=Mine())
    x = normal(2, 64)
    y = eqq.qmatmul(x, p.T, kernel="mine")
    assert seen == [(None, (32, 128))]
    assert error(y, x, np.asarray(q.dequantize(), np.float64).T) < 1e-5


# What is done with an array whose rows are in panels is done with the array.
@pytest.mark.examples(2)
@all_formats
def test_operations(format):
    q, p = in_panels(2, 192, 96, format=format)
    same = lambda a, b: np.testing.assert_array_equal(as_dense(a), as_dense(b))
    for fn in (
        lambda q: q[1],
        lambda q: q[:, 3],
        lambda q: q[1, 64:100],
        lambda q: q[0][jnp.array([3, -1, 191, 500])],
        lambda q: q[0][np.arange(192) % 3 == 0],
        lambda q: q.mT[0],
        lambda q: q.transpose(1, 0, 2),
        lambda q: q.astype(jnp.bfloat16),
        lambda q: jax.vmap(lambda q: q.dequantize())(q),
        lambda q: eqq.implicit(lambda w: w[:, 5:70])(q),
        lambda q: eqq.implicit(lambda w: w.reshape(384, 96))(q),
        lambda q: eqq.implicit(lambda w: jnp.concatenate([w, w], 1))(q),
        lambda q: eqq.implicit(lambda w: jnp.concatenate([w, w], 0))(q),
        lambda q: eqq.implicit(lambda w: 0.5 * w)(q),
        lambda q: eqq.tree_prepack(q, platform="gpu"),
        lambda q: jax.jit(lambda q: q)(q),
    ):
        same(fn(p), fn(q))
    if isinstance(format, eqf.AbstractScaled):
        same(p.scale, q.scale)


def as_dense(x):
    return np.asarray(x.dequantize() if eqq.is_quantized(x) else x)


@pytest.mark.examples(1)
@all_formats
def test_products_of_stacks(format):
    q, p = in_panels(2, 192, 96, format=format)
    x = normal(2, 3, 96)
    for fn in (
        lambda x, w: x @ w.mT,
        lambda x, w: x[0] @ w.mT,
        lambda x, w: jax.vmap(lambda x, w: x @ w.T)(x, w),
        lambda x, w: x[0, 0] @ w[1].T,
        lambda x, w: jax.lax.scan(lambda c, w: (c, c @ w.T), x[0], w)[1],
        lambda x, w: jax.grad(lambda x: jnp.sum(jnp.sin(x @ w.mT)))(x),
        eqq.implicit(lambda x, w: jnp.einsum("bmk,bnk->bmn", x, w)),
        eqq.implicit(lambda x, w: jnp.einsum("bmk,cnk->bmcn", x, w)),
    ):
        y, expected = jax.jit(fn)(x, p), jax.jit(fn)(x, q)
        np.testing.assert_allclose(y, expected, rtol=1e-3, atol=1e-3)


def test_files_are_canonical(tmp_path):
    q, p = in_panels(128, 64, format=eqf.Q4_0())
    path = tmp_path / "w.safetensors"
    eqq.save(path, {"w": p, "again": p})
    loaded = eqq.load(path)
    assert loaded["w"].layout == q.layout and equal(loaded["w"], q)
    like = eqq.load(path, like={"w": p, "again": q})
    assert equal(like["w"], p) and equal(like["again"], q)


# Rows are taken apart and joined as they lie side by side.
def test_loaded_from_a_tree():
    q, p = in_panels(128, 64, format=eqq.NF4())
    model = {"a": jnp.zeros((64, 64)), "b": jnp.zeros((64, 64))}
    rename = {"both": eqq.interop.Split("a", "b")}
    loaded = eqq.interop.load_into(model, {"both": p}, rename=rename)
    np.testing.assert_array_equal(loaded["a"].dequantize(), q[:64])
    np.testing.assert_array_equal(loaded["b"].dequantize(), q[64:])


def test_skeletons():
    q, p = in_panels(128, 64, format=eqq.NF4())
    skeleton = jax.eval_shape(lambda: eqq.tree_prepack(q))
    assert jtu.tree_structure(skeleton) == jtu.tree_structure(p)
    mesh = jax.make_mesh((1,), ("i",))
    spec = jax.sharding.PartitionSpec("i", None)
    placed = skeleton.with_sharding(jax.sharding.NamedSharding(mesh, spec))
    assert placed.layout == q.layout and placed.shape == q.shape


def test_exported():
    q, p = in_panels(128, 64, format=eqq.NF4())
    x = normal(2, 64)
    exported = jax.export.export(jax.jit(lambda x, w: x @ w.T))(x, p)
    again = jax.export.deserialize(exported.serialize())
    np.testing.assert_allclose(again.call(x, p), x @ q.T, rtol=1e-5, atol=1e-5)
    assert again.in_tree == exported.in_tree
    # Panels were of another shape in version 2.
    with pytest.raises(ValueError, match="export it again"):
        _exported._from_json(b'{"version": 2}')


# Panels are for one device, for whole panels, and for what is read only.
def test_what_stays_side_by_side():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("i", None))
    q, p = in_panels(128, 64, format=eqq.NF4())
    placed = p.with_sharding(sharding)
    assert not placed.layout.panels
    np.testing.assert_array_equal(placed.dequantize(), q.dequantize())
    written = dataclasses.replace(q, writable=True)
    odd = eqq.quantize(normal(100, 64), eqq.NF4(), axis=-1)
    vector = eqq.quantize(normal(64), eqq.NF4())
    for other in (q.with_sharding(sharding), written, odd, vector):
        assert eqq.tree_prepack(other) is other
    for format in (eqf.Q6_K(), eqq.Ternary(), eqq.Binary(), eqf.Nested(eqq.NF4())):
        q = eqq.quantize(normal(128, 256), format, axis=-1)
        assert not eqq.tree_prepack(q).layout.panels
    # Many rows of inputs of one digit are fastest by `native_integers`.
    q = eqq.quantize(normal(128, 256), "int4", axis=-1, activation="int8")
    assert not eqq.tree_prepack(q).layout.panels
    declared = p.with_sharding(jax.sharding.PartitionSpec("i", None))
    with jax.set_mesh(mesh):
        x = normal(2, 64)
        y = jax.jit(lambda x, w: x @ w.T)(x, declared)
    np.testing.assert_allclose(y, x @ p.dequantize().T, rtol=1e-4, atol=1e-4)
