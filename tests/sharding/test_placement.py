import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._array import _quantize

from ..helpers import formats, main_formats, native_formats, normal, trees_equal
from .meshes import collectives, kinds, mesh, put, run, shard


def _encode(w, layout):
    return _quantize._encode(w, layout, -2, _quantize.encode_held, ())


all_kinds = pytest.mark.parametrize("kind", kinds)


def _same(a, b):
    return trees_equal(jax.device_get(a.stored), jax.device_get(b.stored))


@pytest.mark.examples(2)
@pytest.mark.parametrize(
    "format, shape, wrong, right",
    (
        (eqq.NF4(128), (512, 16), ("d",), ("P(None, 'd')",)),
        (eqq.NF4(128), (512, 15), ("d",), ("P(None, None)",)),
        # Each half has two blocks, so one of two axes may stay.
        (eqq.NF4(128), (512, 16), (("a", "b"),), ("P('a', 'b')", "P('b', 'a')")),
        # Whole blocks, but not of the scales.
        (
            eqq.Nested(eqq.NF4(16), scale=eqq.Int8(32)),
            (1024, 16),
            (("a", "b"),),
            ("P('a', 'b')",),
        ),
        # Whole blocks of the grid, but not of the rotation.
        (eqq.Rotated(eqq.Int4(32), 128), (512, 16), ("d",), ("P(None, 'd')",)),
        # Five codes are one byte.
        (eqq.Ternary(), (24, 16), ("d",), ("P(None, 'd')",)),
        (eqq.NF4(), (512, 12), (None, "d"), ("P('d', None)",)),
    ),
)
def test_the_nearest_specs_are_named(format, shape, wrong, right):
    on = mesh("auto", 2, 4) if wrong == (("a", "b"),) else jax.make_mesh((8,), ("d",))
    w = normal(*shape)
    q = eqq.quantize(w, format)
    with pytest.raises(ValueError, match="Splitting|cannot be split") as caught:
        q.with_sharding(NamedSharding(on, P(*wrong)))
    for spec in right:
        assert spec in str(caught.value)
        q.with_sharding(NamedSharding(on, eval(spec)))


@all_kinds
def test_quantize_names_them_too(kind):
    w = put(normal(512, 16), mesh(kind, 8), "a")
    with pytest.raises(ValueError, match=r"P\(None, 'a'\)"):
        eqq.quantize(w, eqq.NF4(128))


@pytest.mark.examples(2)
@native_formats
def test_quantize(format):
    assert_quantized_in_place(format, "auto")


@pytest.mark.examples(1)
@main_formats
def test_quantize_on_an_explicit_mesh(format):
    assert_quantized_in_place(format, "explicit")


def assert_quantized_in_place(format, kind):
    """It stays where it is, nothing of its size is sent, and it comes out the same."""
    on = mesh(kind, 4, 2)
    k = 1280 if isinstance(format, eqq.Ternary) else 512
    k = 960 if format.block_size == 48 else k
    w = normal(k, 16)
    sharded = put(w, on, "b", "a")
    q, expected = eqq.quantize(sharded, format), eqq.quantize(w, format)
    assert _same(q, expected)
    assert q.placement.is_equivalent_to(sharded.sharding, 2)
    assert q.sharding == sharded.sharding
    sent = collectives(lambda w: _encode(w, q.layout), sharded)
    assert set(sent) <= {"all-reduce"}
    assert f"f32[{k},16]" not in str(sent) and f"f32[16,{k}]" not in str(sent)
    decoded, sent = run(lambda q: q.dequantize(), q)
    assert sent == {}
    np.testing.assert_array_equal(decoded, expected.dequantize())


@all_kinds
def test_the_declaration_follows(kind):
    on = mesh(kind, 2, 4)
    q = shard(eqq.quantize(normal(4, 256, 64)), on, None, "a", "b")
    assert q.sharding.spec == P(None, "a", "b")
    assert q.mT.sharding.spec == P(None, "b", "a")
    assert q.mT.placement.is_equivalent_to(q.mT.sharding, 3)
    assert q[1].sharding.spec == P("a", "b")
    assert q[1].placement.is_equivalent_to(q[1].sharding, 2)
    seen = []
    jax.vmap(lambda q: seen.append(q.T.sharding.spec) or q.dequantize())(q)
    assert seen[0][-2:] == ("b", "a")
    stacked = jtu.tree_map(lambda *a: jnp.stack(a), q[0], q[1])
    assert stacked.placement.is_equivalent_to(q.sharding, 3)


def test_arrays_win():
    on = mesh("auto", 8)
    q = eqq.quantize(normal(512, 64))
    moved = eqx.tree_at(lambda q: q.stored, shard(q, on, "a"), q.stored)
    assert moved.sharding.spec == P("a", None) and not moved.is_sharded
    elsewhere = jax.device_put(q.stored, NamedSharding(on, P(None, "a")))
    elsewhere = dataclasses.replace(shard(q, on, "a"), stored=elsewhere)
    assert elsewhere.placement.spec == P(None, "a") and elsewhere.is_sharded
    assert collectives(lambda x: x @ elsewhere, put(normal(4, 512), on)) == {}
    good, undone = shard(q, on, "a"), shard(q, on, "a").with_sharding(None)
    only_declared = q.with_sharding(P("a"))
    model = {"a": elsewhere, "b": good, "c": moved, "d": only_declared, "e": undone}
    report = eqq.report(model)
    rows = {row.path: (row.sharding, row.declared) for row in report.rows}
    assert rows == {
        "a": ("P(None, 'a')", "P('a', None)"),
        "b": ("P('a', None)", None),
        "c": (None, "P('a', None)"),
        "d": (None, "P('a', None)"),
        "e": ("P('a', None)", None),
    }
    text = repr(report)
    assert "a is split as P(None, 'a'), but was declared P('a', None)" in text
    assert "c is not split, but was declared P('a', None)" in text


# Rows are looked up where they are, and only what is packed of them is sent.
@pytest.mark.examples(2)
@all_kinds
@pytest.mark.parametrize("name", ("nf4", "int8"))
def test_rows(name, kind):
    on = mesh(kind, 2, 4)
    q = eqq.quantize(normal(64, 256), formats[name], axis=-1)
    sharded = shard(q, on, "b", "a")
    ids = put(jnp.array([[3, 60], [7, 7]]), on)
    take = jax.jit(lambda q, ids: (q[ids], q[5], q[8:10]))
    for found, expected in zip(take(sharded, ids), take(q, np.asarray(ids))):
        np.testing.assert_array_equal(found, expected)
    sent = collectives(lambda q, ids: q[ids], sharded, ids)
    assert "f32[64,128]" not in str(sent) and "f32[64,256]" not in str(sent)


# `device_put` goes by the axes of the stored arrays. What it does not refuse has the
# same numbers, and is placed as `placement` says, as by `with_sharding`.
@pytest.mark.examples(3)
@pytest.mark.parametrize("name", ("nf4", "int8", "int8-32", "nested"))
@pytest.mark.parametrize("axis", (-1, -2))
@pytest.mark.parametrize("spec", (P("a"), P(None, "b"), P("a", "b")))
def test_device_put(name, axis, spec):
    on = mesh("auto", 2, 4)
    q = eqq.quantize(normal(512, 1024), formats[name], axis=axis)
    try:
        found = jax.device_put(q, NamedSharding(on, spec))
    except ValueError as error:
        assert "divi" in str(error)
        return
    assert _same(found, q)
    meant = q.with_sharding(found.placement)
    pairs = zip(*map(jtu.tree_leaves, (found.stored, meant.stored)), strict=True)
    assert all(a.sharding.is_equivalent_to(b.sharding, a.ndim) for a, b in pairs)
    # Another declaration moves it to where it should be.
    again = found.with_sharding(NamedSharding(on, P(None, None)))
    assert not again.is_sharded
