import dataclasses
import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
import safetensors
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant.interop import load, save
from eqquant.interop._own import _load, _write

from ..helpers import main_formats, normal
from .same import bits, same


mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))
explicit = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)


def _tensors(path):
    with safetensors.safe_open(path, framework="numpy") as file:
        return {name: bits(file.get_tensor(name)) for name in file.keys()}


def _told(monkeypatch, module, name, size):
    """What `size` says of each call of a function, by its arguments and what it
    returned."""
    sizes = []
    fn = getattr(module, name)

    def told(*args):
        out = fn(*args)
        sizes.append(size(args, out))
        return out

    monkeypatch.setattr(module, name, told)
    return sizes


@pytest.mark.examples(1)
@pytest.mark.parametrize("spec", (P("a", "b"), P(None, ("b", "a"))))
@main_formats
def test_part_by_part(format, spec, path, monkeypatch):
    # Whole bytes and blocks, of each format, in an eighth of them.
    q = eqq.quantize(normal(16, 20480), format, axis=-1)
    placed = q.with_sharding(NamedSharding(mesh, spec))
    save(path, [q])
    whole = _tensors(path)
    stored = jtu.tree_leaves(placed.stored)
    largest = max(a.addressable_shards[0].data.size for a in stored)
    assert largest < max(a.size for a in stored)

    written = _told(monkeypatch, _write, "_write_part", lambda args, _: args[-1].size)
    save(path, [placed])
    assert max(written) == largest
    assert sum(written) == sum(a.size for a in stored)
    assert _tensors(path) == whole

    read = _told(monkeypatch, _load, "_part", lambda _, out: out.size)
    (loaded,) = load(path, like=[placed])
    assert max(read) == largest
    assert same(loaded, placed)
    assert loaded.placement == placed.placement


@pytest.mark.parametrize("mesh", (mesh, explicit), ids=("auto", "explicit"))
def test_bytes_that_a_file_packs_otherwise(mesh, path):
    # Half of the weight ends within one of the file's bytes, of five codes.
    q = eqq.quantize(normal(64, 64), eqq.Ternary(32), axis=-1)
    q = eqq.tree_prepack(q, platform="gpu")
    sharding = NamedSharding(mesh, P("a", "b"))
    placed = q.with_sharding(sharding)
    with pytest.raises(ValueError, match="through a block or a byte"):
        eqq.tree_prepack(q, platform="cpu").with_sharding(sharding)
    save(path, [q])
    whole = _tensors(path)
    save(path, [placed])
    assert _tensors(path) == whole
    (loaded,) = load(path, like=[placed])
    assert same(loaded, placed)
    assert loaded.placement == placed.placement == sharding


@pytest.mark.parametrize("k", (3, 7, 12))
def test_few_codes(k, path):
    # As many bytes of four codes as of five, or more.
    q = eqq.quantize(normal(2, k), "ternary", axis=-1)
    packed = eqq.tree_prepack(q, platform="gpu")
    save(path, [packed])
    assert same(load(path), [q])
    assert same(load(path, like=[packed]), [packed])


def make():
    return {
        "q": eqq.quantize(normal(64, 16), eqq.NF4(16), axis=-1),
        "x": normal(8, 6),
        "keys": jr.split(jr.key(0), 8),
    }


def _placed(tree, mesh):
    along = NamedSharding(mesh, P("a", None))
    return {
        "q": tree["q"].with_sharding(along),
        "x": jax.device_put(tree["x"], along),
        "keys": jax.device_put(tree["keys"], NamedSharding(mesh, P("b"))),
    }


def _same_placed(loaded, expected):
    def placements(tree):
        return [x.sharding for x in jtu.tree_leaves(tree)]

    equivalent = [
        a.sharding.is_equivalent_to(b.sharding, a.ndim)
        for a, b in zip(jtu.tree_leaves(loaded), jtu.tree_leaves(expected))
    ]
    return same(loaded, expected) and all(equivalent)


def test_skeleton_that_is_placed(path):
    expected = _placed(make(), mesh)
    save(path, make())
    skeleton = eqx.filter_eval_shape(make)
    like = {
        "q": skeleton["q"].with_sharding(NamedSharding(mesh, P("a"))),
        "x": jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=expected["x"].sharding),
        "keys": expected["keys"],
    }
    assert like["q"].placement == expected["q"].placement
    assert _same_placed(load(path, like=like), expected)


def test_skeleton_of_a_mesh_with_explicit_axes(path):
    save(path, make())
    with jax.set_mesh(explicit):
        expected = _placed(make(), explicit)
        like = jax.eval_shape(lambda tree: tree, expected)
        assert _same_placed(load(path, like=like), expected)
    with pytest.raises(ValueError, match=r"jax\.set_mesh\(mesh\)"):
        load(path, like=like)


def test_skeleton_that_only_declares(path):
    save(path, make())
    sharding = NamedSharding(mesh, P("a", None))
    like = eqx.filter_eval_shape(make)
    like["q"] = dataclasses.replace(like["q"], sharding=sharding)
    assert load(path, like=like)["q"].placement == sharding


def test_arrays_win_over_what_was_declared(path):
    save(path, make())
    like = make()
    q = like["q"].with_sharding(NamedSharding(mesh, P("a")))
    like["q"] = jtu.tree_map(lambda x: jnp.asarray(np.asarray(x)), q)
    loaded = load(path, like=like)["q"]
    assert not loaded.is_sharded and loaded.sharding is None


@pytest.mark.parametrize(
    "dtype", ("int4", "bool", "bfloat16", "complex64", "float8_e5m2")
)
@pytest.mark.parametrize("shape", ((8, 4), (8, 0, 4), (2, 8)))
def test_dtypes(dtype, shape, path):
    numbers = np.arange(math.prod(shape)).reshape(shape) % 2
    x = jnp.asarray(numbers, dtype)
    spec = P(None, "a") if shape == (2, 8) else P("a", None)
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    save(path, [placed])
    assert _same_placed(load(path, like=[placed]), [placed])
    assert same(load(path), [x])


def test_memory_of_the_host(path):
    sharding = NamedSharding(mesh, P("a"), memory_kind="pinned_host")
    x = jax.device_put(normal(8), sharding)
    save(path, [x])
    (loaded,) = load(path, like=[x])
    assert loaded.sharding == sharding and bits(loaded) == bits(x)


def test_layout_of_a_file(path):
    tree = {
        "a": jnp.ones(3, jnp.uint8),
        "b": jnp.ones((2, 0)),
        "c": jnp.ones(5, jnp.bfloat16),
        "d": np.ones((), np.float64),
        "e": jnp.ones((7, 2)),
    }
    save(path, tree)
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    assert size % 8 == 0
    header.pop("__metadata__")
    offsets = sorted(entry["data_offsets"] for entry in header.values())
    # Without holes, and each tensor aligned.
    assert [0, *(end for _, end in offsets)] == [
        *(begin for begin, _ in offsets),
        len(content) - 8 - size,
    ]
    for name, x in tree.items():
        assert header[name]["data_offsets"][0] % x.dtype.itemsize == 0


def test_names_that_are_not_unicode(path):
    with pytest.raises(ValueError, match="surrogates not allowed"):
        save(path, {"\ud800": normal(2)})
    assert not path.exists()
