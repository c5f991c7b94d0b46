import dataclasses
import functools as ft
import json
import os
import pathlib
from typing import ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings, strategies as st
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant.interop import load, save

from ..helpers import native_formats, normal
from .same import bits, same


class Sixteen(eqq.AbstractFormat):
    """A user's own format, with fields of every type that can be written."""

    block_size: int | None = eqx.field(default=None, static=True)
    exact: bool = eqx.field(default=True, static=True)
    clip: float = eqx.field(default=float("inf"), static=True)
    note: str = eqx.field(default='"é\n', static=True)
    inner: eqq.AbstractFormat = eqx.field(default=eqq.NF4(), static=True)
    kind: np.dtype = eqx.field(default=jnp.dtype("bfloat16"), static=True)
    bits: ClassVar[float] = 16

    def encode(self, w, scale=None):
        codes = lax.bitcast_convert_type(w.astype(self.kind), jnp.uint16)
        return {"codes": {"of": codes}}

    def decode(self, stored, tail):
        codes = stored["codes"]["of"]
        return lax.bitcast_convert_type(codes, self.kind).astype(jnp.float32)

    def shape(self, stored, tail):
        return stored["codes"]["of"].shape


@pytest.mark.examples(2)
@native_formats
def test_formats(format, path):
    @jax.jit
    def quantized():
        return {
            "columns": eqq.quantize(normal(33, 5), format),
            "rows": eqq.quantize(normal(5, 33).astype(jnp.bfloat16), format, axis=-1),
            "vector": eqq.quantize(normal(70), format),
            "stack": eqq.quantize(normal(2, 3, 20, 7), format, activation=eqq.Int8()),
            "filters": eqq.quantize(normal(4, 3, 2, 5), format, axis=(-3, -2, -1)),
            "empty": eqq.quantize(normal(0, 64), format, axis=-1),
        }

    tree = quantized()
    tree["transposed"] = tree["stack"].mT
    save(path, tree)
    assert same(load(path), eqq.tree_prepack(tree, platform="cpu"))


_trees = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers()
    | st.sampled_from([(), (0,), (2, 3)]).map(lambda shape: normal(*shape)),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(st.text(max_size=3), children, max_size=3)
        | st.dictionaries(st.integers(-3, 3), children, max_size=3)
    ),
    max_leaves=6,
)


@given(tree=_trees)
@settings(max_examples=15)
def test_dictionaries_and_lists(tree, tmp_path_factory):
    path = tmp_path_factory.getbasetemp() / "tree.safetensors"
    save(path, tree)
    assert same(load(path), tree)
    assert same(load(path, like=tree), tree)


_bytes = np.random.default_rng(0).integers(0, 256, 48, np.uint8)
_any_bits = [
    *("int8", "int16", "int32", "uint8", "uint16", "uint32"),
    *("float16", "bfloat16", "float32", "complex64"),
    *("float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn"),
    *("float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
_wide = ["int64", "uint64", "float64", "complex128"]
_narrow = ["int2", "int4", "uint2", "uint4", "bool"]


def _arrays(numbers):
    scalar, empty = numbers[0].reshape(()), numbers[:0].reshape(0, 2)
    return [numbers.reshape(numbers.size // 3, 3), scalar, empty]


@pytest.mark.parametrize("dtype", [*_any_bits, *_wide, *_narrow])
def test_dtypes(dtype, path):
    numbers = (
        np.tile(np.arange(-2, 2), 12).astype(jnp.dtype(dtype))
        if dtype in _narrow
        else _bytes.view(jnp.dtype(dtype))
    )
    with jax.enable_x64(dtype in _wide):
        tree = jax.device_put(_arrays(numbers))
        assert tree[0].dtype == dtype
        save(path, tree)
        assert same(load(path), tree)
        assert same(load(path, like=jax.eval_shape(lambda: tree)), tree)


def test_numpy(path):
    class Subclass(np.ndarray):
        pass

    tree = [
        np.arange(6, dtype=np.int32).reshape(2, 3).T,
        np.arange(6, dtype=np.float32)[::-2],
        np.ones(3, ml_dtypes.bfloat16),
        np.float32(0.1),
        np.array(True),
        np.arange(2, dtype=np.int8).view(Subclass),
    ]
    save(path, tree)
    loaded = load(path)
    assert [type(x) for x in loaded] == [np.ndarray] * 3 + [np.float32] + [
        np.ndarray
    ] * 2
    assert all(map(np.array_equal, loaded, tree))
    assert [x.dtype for x in loaded] == [x.dtype for x in tree]
    assert same(load(path, like=tree), loaded)


def test_model(path):
    class Model(eqx.Module):
        mlp: eqx.nn.MLP
        layers: list
        key: jax.Array
        size: int = eqx.field(static=True)

    def make():
        keys = jr.split(jr.key(0), 3)
        linear = eqx.nn.Linear(64, 64, key=keys[1])
        layers = [linear, eqx.nn.Lambda(jax.nn.relu), eqx.nn.Dropout()]
        mlp = eqx.nn.MLP(64, 64, 64, 1, key=keys[0])
        return Model(mlp, layers, jr.key_data(keys[2]), 7)

    model = eqq.tree_quantize(make())
    save(path, model)
    loaded = load(path, like=make())
    assert same(loaded, model)
    x = normal(64)
    assert same(loaded.layers[1](loaded.mlp(x)), model.layers[1](model.mlp(x)))


def test_state(path):
    def make():
        layer = ft.partial(eqx.nn.BatchNorm, 3, axis_name="batch", mode="batch")
        return eqx.nn.make_with_state(layer)()

    pair = make()
    save(path, pair)
    assert same(load(path, like=eqx.filter_eval_shape(make)), pair)


def test_tied(path):
    x, q = normal(4, 4), eqq.quantize(normal(64, 64), "int4")
    tree = {"a": x, "b": [x, q], "c": {"d": q, "e": q.T, "f": normal(4, 4)}}
    save(path, tree)
    for like in (None, tree, jtu.tree_map(jnp.copy, tree)):
        loaded = load(path, like=like)
        assert same(loaded, tree)
        assert loaded["a"] is loaded["b"][0]
        assert loaded["a"] is not loaded["c"]["f"]
        assert loaded["b"][1] is loaded["c"]["d"]
        # Two quantized arrays, of the same stored arrays.
        codes = [q.stored["codes"] for q in (loaded["c"]["d"], loaded["c"]["e"])]
        assert codes[0] is codes[1]
    size = x.nbytes * 2 + q.nbytes
    assert size < path.stat().st_size < size + 3000


def test_tied_by_equinox(path):
    embedding = eqx.nn.Embedding(4, 3, key=jr.key(0))
    linear = eqx.nn.Linear(3, 4, key=jr.key(1))
    shared = eqx.nn.Shared(
        (embedding, linear), lambda pair: pair[1].weight, lambda pair: pair[0].weight
    )
    save(path, shared)
    loaded = load(path, like=shared)
    assert same(loaded, shared)
    embedding, linear = loaded()
    assert embedding.weight is linear.weight


def test_sharding_is_declared_again(path):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
    q = eqq.quantize(normal(64, 16), eqq.NF4(16))
    specs = [P("a", "b"), P(None, ("b", "a")), P("a")]
    placed = [q.with_sharding(NamedSharding(mesh, spec)) for spec in specs]
    declared = [q.with_sharding(spec) for spec in specs]
    save(path, placed)
    assert same(load(path), declared)
    save(path, declared)
    assert same(load(path), declared)


def test_sharded_arrays(path):
    mesh = Mesh(np.array(jax.devices()), ("a",))
    x = jax.device_put(normal(8, 4), NamedSharding(mesh, P("a")))
    save(path, {"x": x})
    assert bits(load(path)["x"]) == bits(x)


def test_own_format(path):
    inner, kind = eqq.Nested(eqq.NF4(16)), jnp.dtype("float16")
    other = Sixteen(32, exact=False, clip=0.1 + 0.2, inner=inner, kind=kind)
    formats = [Sixteen(), other]
    tree = [eqq.quantize(normal(3, 32), f, activation=f) for f in formats]
    save(path, tree)
    assert same(load(path), tree)


def test_readable_without_this_library(path):
    tree = {"w": eqq.quantize(normal(64, 32), "nf4"), "b": jnp.arange(2.0)}
    save(path, tree)
    with safetensors.safe_open(path, framework="numpy") as file:
        assert set(file.keys()) == {"b", "w.codes", "w.scale"}
        assert bits(file.get_tensor("b")) == bits(tree["b"])
        # As they lie in memory.
        for name, x in tree["w"].stored.items():
            assert bits(file.get_tensor(f"w.{name}")) == bits(x)
        described = json.loads(file.metadata()["eqquant"])
    assert described["version"] == 2
    w = described["quantized"]["w"]
    assert (w["shape"], w["dtype"], w["axis"]) == ([64, 32], "float32", -2)
    assert w["row_axis"] == tree["w"].layout.row_axis
    assert w["format"]["name"] == "NF4"
    assert w["format"]["fields"]["block_size"] == 64


@pytest.mark.examples(4)
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize("format", [eqq.Ternary(16), eqq.Int4(16), eqq.Int8()])
def test_stored_as_in_memory(format, axis, platform, path):
    q = eqq.quantize(normal(2, 33, 20), format, axis=axis)
    packed = eqq.tree_prepack(q, platform=platform)
    save(path, {"w": packed})
    with safetensors.safe_open(path, framework="numpy") as file:
        for name, x in packed.stored.items():
            assert file.get_slice(f"w.{name}").get_shape() == [*x.shape]
            assert bits(file.get_tensor(f"w.{name}")) == bits(x)
    assert same(load(path, like={"w": packed}), {"w": packed})
    assert same(load(path, like={"w": q}), {"w": q})
    assert same(load(path), {"w": q})
    with eqq.interop.open(path) as checkpoint:
        assert same(checkpoint["w"], q)


def test_bfloat16_is_bfloat16_for_others(path):
    save(path, {"w": normal(3, dtype=jnp.bfloat16)})
    with safetensors.safe_open(path, framework="flax") as file:
        assert same(file.get_tensor("w"), normal(3, dtype=jnp.bfloat16))


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_paths(kind, path, monkeypatch):
    save(kind(path), [1])
    assert load(kind(path)) == [1]
    monkeypatch.chdir(path.parent)
    save(kind("relative"), [2])
    assert load(kind("relative")) == [2]


def test_by_equinox(path):
    def make(seed):
        return eqx.nn.MLP(64, 64, 64, 1, key=jr.key(seed))

    model = eqq.tree_quantize(make(0))
    eqx.tree_serialise_leaves(path, model)
    like = eqx.filter_eval_shape(lambda: eqq.tree_quantize(make(1)))
    assert same(eqx.tree_deserialise_leaves(path, like), model)


def test_save_does_not_change_the_model(path):
    q = eqq.quantize(normal(16, 16), "int8")
    before = dataclasses.replace(q, stored=jtu.tree_map(jnp.copy, q.stored))
    save(path, [q])
    assert same(q, before)
    assert os.listdir(path.parent) == [path.name]
