"""What holds for every format: of this library, and of the files of others."""

import dataclasses
import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant.formats import as_format

from ..helpers import (
    all_formats,
    error,
    formats,
    many_at_once,
    normal,
    over,
    trees_equal,
)


# The largest error of normal numbers, relative to their norm, by the bits of a code.
largest_error = {1: 0.65, 1.6: 0.9, 2: 0.65, 3: 0.3, 4: 0.2, 5: 0.08, 6: 0.06}
largest_error |= {7: 0.03, 8: 0.08}


# One of each kind of stored arrays.
kinds = over(
    (
        *("ternary-tensor", "nested", "int-3-minimum", "int-4-ordered"),
        *("fp8-e5m2-tensor", "bnb-fp4", "bnb-double", "mxfp4", "nvfp4"),
        *("q4_0", "q4_1", "q4_k", "tq1_0", "trellis"),
    )
)


# One shape for all: rows that no block and no byte divides. What is compiled for it is
# shared by the tests.
@functools.cache
def quantized(format):
    q = eqq.quantize(normal(300, 5), format)
    return q, np.asarray(q.dequantize())


def relative_error(decoded, w):
    w, decoded = np.asarray(w, np.float64), np.asarray(decoded, np.float64)
    return np.linalg.norm(decoded - w) / np.linalg.norm(w)


_formats_of_ternary = (eqq.formats.Q2_0, eqq.formats.TQ1_0, eqq.formats.TQ2_0)


def is_ternary(format):
    return isinstance(format, _formats_of_ternary)


def bound(format):
    return largest_error[1.6 if is_ternary(format) else format.bits]


@pytest.mark.examples(5)
@all_formats
def test_round_trip(format):
    w = normal(300, 5, dtype=jnp.float16)
    q = _round_trip(w, format, -2)
    # Scales are computed in float32.
    wide = eqq.quantize(w.astype(jnp.float32), format)
    assert trees_equal(wide.stored, q.stored)


# A format does not know what is contracted.
@pytest.mark.examples(3)
@kinds
def test_several_axes_as_one(format):
    _round_trip(normal(4, 3, 20, dtype=jnp.bfloat16), format, (0, 2))


def _round_trip(w, format, axis):
    q = eqq.quantize(w, format, axis=axis)
    decoded = q.dequantize()
    assert q.shape == decoded.shape == w.shape
    assert q.dtype == decoded.dtype == w.dtype
    assert all(jnp.issubdtype(a.dtype, jnp.integer) for a in jtu.tree_leaves(q.stored))
    assert relative_error(decoded, w) < bound(format)
    return q


@all_formats
def test_empty(format):
    for shape, axis in (((0,), -1), ((2, 0, 3), -2)):
        q = jax.eval_shape(lambda: eqq.quantize(jnp.zeros(shape), format, axis=axis))
        assert q.shape == jax.eval_shape(lambda: q.dequantize()).shape == shape


@all_formats
def test_zeros(format):
    w = np.ones((300, 5), np.float32)
    w[:, 2] = w[:256, 3] = 0
    decoded = np.asarray(eqq.quantize(w, format).dequantize())
    assert np.all(np.isfinite(decoded)) and np.all(decoded[:, 2] == 0)
    if not isinstance(format, eqq.Binary | eqq.Trellis):
        assert np.all(decoded[w == 0] == 0)
    # (The scales of these are means, zeros included.)
    if not isinstance(format, eqq.Binary | eqq.Ternary | eqq.Trellis):
        np.testing.assert_allclose(decoded, w, rtol=0.34 if format.bits == 2 else 0.04)
    assert np.all(eqq.quantize(0 * w, format).dequantize() == 0)


@jax.jit(static_argnums=1)
def decode_and_multiply(w, format):
    q = eqq.quantize(w, format, axis=-1)
    return q.dequantize(), q @ jnp.ones(w.shape[1])


@pytest.mark.examples(4)
@all_formats
def test_not_finite(format):
    # (From 64 x 64 numbers, a maximum on CPU drops NaNs.)
    w = np.array(normal(70, 300))
    clean, _ = map(np.asarray, decode_and_multiply(w, format))
    for value in (np.nan, np.inf, -np.inf):
        broken = w.copy()
        broken[1, 260] = value
        found, y = map(np.asarray, decode_and_multiply(broken, format))
        nan, size = np.isnan(found), format.block_size or 300
        assert np.all(nan[1, 260 // size * size : (260 // size + 1) * size])
        np.testing.assert_array_equal(found[~nan], clean[~nan])
        np.testing.assert_array_equal(np.isnan(y), np.any(nan, axis=1))
        # Unless all numbers share a scale, only those of the block.
        if _is_for_all_rows(format):
            assert np.all(nan)
        else:
            assert np.sum(nan) <= (300 if format == formats["nested"] else size)
    with pytest.raises(ValueError, match="`w` should be finite"):
        w[1, 260] = np.nan
        eqq.quantize(w, format)


def _is_for_all_rows(format):
    names = ("nvfp4", "bnb-double", "fp8-e5m2-tensor", "ternary-tensor")
    return format in [formats[name] for name in names]


@jax.jit
def products(x, ct, q):
    y, pullback = jax.vjp(lambda x: x @ q, x)
    each = jax.vmap(lambda x: q.T @ x)(x[0])
    reference = eqq.qmatmul(x[0], q, kernel="reference")
    return y, *pullback(ct), each, reference, x[0].astype(jnp.bfloat16) @ q


@all_formats
def test_products(format):
    q, w = quantized(format)
    x, ct = normal(2, 3, 300, seed=1), normal(2, 3, 5, seed=2)
    y, dx, each, reference, narrow = products(x, ct, q)
    assert error(y, x, w) < 1e-5
    assert error(dx, ct, w.T) < 1e-5
    assert error(each, x[0], w) < 1e-5
    assert error(reference, x[0], w) < 1e-5
    assert narrow.dtype == jnp.bfloat16
    assert error(narrow, x[0].astype(jnp.bfloat16), w) < 1e-2


# One with what all rows share, one whose scales are put together, one of blocks, and
# one of tiles.
some_formats = pytest.mark.parametrize(
    "name", ["int-4-ordered", "nvfp4", "q4_k", "trellis"]
)


# Large enough for the reference to take some rows at a time.
@pytest.mark.examples(1)
@some_formats
def test_product_in_tiles(name):
    q, _ = quantized(formats[name])

    def repeat(a):
        shared = a.shape[q.layout.row_axis] == 1
        return a if shared else jnp.repeat(a, 130, axis=q.layout.row_axis)

    q = dataclasses.replace(q, stored=jtu.tree_map(repeat, q.stored))
    assert q.shape == (300, 650)
    x, w = normal(4, 300, seed=1), np.asarray(q.dequantize())
    assert error(eqq.qmatmul(x, q, kernel="reference"), x, w) < 1e-5
    x = normal(4, 650, seed=1)
    assert error(eqq.qmatmul(x, q.T, kernel="reference"), x, w.T) < 1e-5


@pytest.mark.examples(3)
@kinds
def test_stacks(format):
    stack = eqq.quantize(normal(3, 300, 5), format)
    dense = np.asarray(stack.dequantize())
    x = normal(3, 2, 300, seed=1)

    @jax.jit
    def products(x, stack):
        layers = [stack[i] for i in range(3)]
        again = jtu.tree_map(lambda *a: jnp.stack(a), *layers)
        _, scanned = lax.scan(lambda carry, layer: (carry, x[0] @ layer), None, stack)
        each = eqx.filter_vmap(lambda x, q: q.T @ x.T)(x, stack).mT
        return layers[1].dequantize(), again, x @ stack, each, scanned

    layer, again, y, each, scanned = products(x, stack)
    np.testing.assert_array_equal(layer, dense[1])
    assert trees_equal(again, stack)
    assert error(y, x, dense) < 1e-5
    assert error(each, x, dense) < 1e-5
    assert error(scanned, x[:1], dense) < 1e-5


@pytest.mark.examples(1)
@some_formats
def test_quantize_mapped(name):
    w = normal(3, 300, 5)
    mapped = eqx.filter_vmap(lambda w: eqq.quantize(w, formats[name]))(w)
    one = eqq.quantize(w[1], formats[name])
    assert mapped.shape == (3, 300, 5)
    # (The sums of a search are of another order.)
    np.testing.assert_allclose(mapped[1].dequantize(), one.dequantize(), atol=0.05)


@pytest.mark.examples(3)
@kinds
def test_rows(format):
    q, dense = quantized(format)
    q, dense = q.T, dense.T
    indices = 2, slice(1, 5, 2), np.array([[3, 0], [3, 4]]), (2, slice(3, 5))
    rows = jax.jit(lambda q: [q[index] for index in indices])(q)
    for row, index in zip(rows, indices, strict=True):
        np.testing.assert_array_equal(row, dense[index])
    np.testing.assert_array_equal(q.mT.dequantize(), dense.T)
    assert trees_equal(q.mT.mT, q)
    if isinstance(format, eqq.formats.AbstractScaled):
        size = format.block_size
        blocks = 1 if size is None else -(-300 // size)
        if isinstance(format, eqq.formats.AbstractGGUF) and "blocks" in q.stored:
            # Whole blocks, each of several parts with scales of their own.
            blocks *= size // format.base.block_size
        of_all = (formats["ternary-tensor"], formats["fp8-e5m2-tensor"])
        rows = 1 if format in of_all else 5
        assert q.scale.shape == (rows, blocks)


@all_formats
def test_by_name(format):
    name = type(format).__name__.lower()
    assert isinstance(as_format(name), type(format))


@many_at_once
def test_save(names, tmp_path):
    tree = {name: quantized(formats[name])[0] for name in names}
    tree["again"] = eqq.quantize(normal(300, 5), "int8", activation=formats["mxfp8"])
    tree["mT"] = tree["q4_k"].mT
    path = tmp_path / "model.safetensors"
    eqq.save(path, tree)
    assert trees_equal(eqq.load(path, like=tree), tree)


# The largest number of each block is one that is stored.
_again = [
    *("fp8", "fp8-e5m2-tensor", "fp4", "bnb-fp4", "mxfp4"),
    *("mxfp8", "q4_0", "q5_0", "q8_0", "tq1_0", "tq2_0"),
]


@pytest.mark.examples(5)
@pytest.mark.parametrize("name", _again)
def test_again(name):
    q, _ = quantized(formats[name])
    new = eqq.quantize(q.dequantize(), formats[name])
    np.testing.assert_allclose(new.dequantize(), q.dequantize(), rtol=3e-7)


def test_not_split_in_any_order():
    devices = jax.devices()[:2]
    mesh = jax.sharding.Mesh(np.array(devices), ("d",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("d", None))
    w = normal(128, 4)
    for name in ("int-4-ordered", "q4_k", "trellis"):
        q = eqq.quantize(w, formats[name])
        with pytest.raises(ValueError, match="would cut through a block"):
            q.with_sharding(sharding)
    whole = (eqq.Int(3, 32), eqq.formats.Q4_1(), eqq.MXFP4(), formats["trellis"])
    for format in whole:
        q = eqq.quantize(normal(512, 4), format)
        placed = q.with_sharding(sharding)
        assert placed.is_sharded
        np.testing.assert_array_equal(placed.dequantize(), q.dequantize())
