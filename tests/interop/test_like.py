import re

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P, SingleDeviceSharding

import eqquant as eqq
from eqquant.interop import load, save

from ..helpers import normal
from .same import bits, same


def make(seed=0):
    keys = jr.split(jr.key(seed))
    return {
        "mlp": eqx.nn.MLP(64, 64, 64, 1, key=keys[0]),
        "dropout": eqx.nn.Dropout(0.1 * (seed + 1)),
        "key": jr.key_data(keys[1]),
    }


dense = make()
quantized = eqq.tree_quantize(dense, "nf4", axis=-1)
likes = {
    "dense": make(1),
    "quantized": eqq.tree_quantize(make(1), "int8", axis=-1),
    "skeleton": eqx.filter_eval_shape(make, 1),
    "quantized-skeleton": eqx.filter_eval_shape(
        lambda: eqq.tree_quantize(make(1), "ternary", axis=-1)
    ),
    "numpy": jtu.tree_map(lambda x: np.asarray(x) if eqx.is_array(x) else x, make(1)),
}


@pytest.mark.parametrize("like", likes.values(), ids=likes)
@pytest.mark.parametrize("model", [dense, quantized], ids=["dense", "quantized"])
def test_every_kind(like, model, tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, model)
    assert same(load(path, like=like), model)


def test_under_jit(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, {"w": normal(2, 3)})

    @jax.jit
    def f(w):
        return load(path, like={"w": w})["w"] + w

    assert same(f(normal(2, 3)), normal(2, 3) + normal(2, 3))


def test_what_is_not_data_is_taken_from_like(tmp_path):
    path = tmp_path / "model.safetensors"
    marker = object()
    save(path, {"f": jax.nn.relu, "of": ["text", normal(2), None], "x": None})
    like = {"f": marker, "of": [jax.nn.gelu, normal(2, seed=1), None], "x": "text"}
    loaded = load(path, like=like)
    assert loaded["f"] is marker
    assert loaded["of"][0] is jax.nn.gelu
    assert loaded["x"] == "text"
    assert same(loaded["of"][1:], [normal(2), None])


def test_one_error_tells_of_every_leaf(tmp_path):
    path = tmp_path / "model.safetensors"
    tree = {
        "right": normal(2),
        "shape": eqq.quantize(normal(16, 2), "int8"),
        "dtype": [normal(3, dtype=jnp.bfloat16)],
        "scalar": 1,
        "array": normal(),
        "dropped": {"a": 1.5},
        "kind": normal(1),
        "list": {0: 2},
    }
    like = {
        "right": jax.ShapeDtypeStruct((2,), jnp.float32),
        "shape": normal(16, 3),
        "dtype": [np.ones(3, np.float32)],
        "scalar": 1.0,
        "array": True,
        "added": {"a": [eqq.quantize(normal(16, 2), "int8")]},
        "kind": jax.nn.relu,
        "list": [2],
    }
    save(path, tree)
    with pytest.raises(ValueError) as info:
        load(path, like=like)
    message = str(info.value)
    assert repr(str(path)) in message
    assert set(message.splitlines()[1:]) == {
        "- shape: expected float32[16,3], got float32[16,2] in Int8().",
        "- dtype.0: expected float32[3], got bfloat16[3].",
        "- scalar: expected float 1.0, got int 1.",
        "- array: expected bool True, got float32[].",
        "- added.a.0: expected float32[16,2] in Int8(), got nothing.",
        "- dropped.a: expected nothing, got float 1.5.",
        "- kind: expected nothing, got float32[1].",
        "- list.0: expected int 2, got nothing.",
        "- list.0: expected nothing, got int 2.",
    }


@pytest.mark.parametrize("tree, like", [([1], 1), (normal(2), [normal(2)])])
def test_another_root(tree, like, tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, tree)
    with pytest.raises(ValueError, match=r"- as a whole: expected .*, got "):
        load(path, like=like)


def test_nothing_is_read_before_all_is_known_to_match(tmp_path, monkeypatch):
    path = tmp_path / "model.safetensors"
    save(path, [normal(2), normal(3)])

    def fail(*args):
        raise AssertionError("read")

    monkeypatch.setattr("eqquant.interop._own._load._read_array", fail)
    with pytest.raises(ValueError, match=re.escape("- 1: expected float32[4]")):
        load(path, like=[normal(2), normal(4)])
    with pytest.raises(AssertionError, match="read"):
        load(path, like=[normal(2), normal(3)])


mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("a", "b"))


def test_placed_as_like_is(tmp_path):
    path = tmp_path / "model.safetensors"
    w = normal(64, 16)
    q = eqq.quantize(w, eqq.NF4(16))
    sharding = NamedSharding(mesh, P("a", "b"))
    keys = jr.split(jr.key(0), 4)
    along = NamedSharding(mesh, P("a"))
    tree = {"dense": w, "q": q, "r": q, "keys": keys, "none": w}
    like = {
        "dense": jax.device_put(normal(64, 16, seed=1), sharding),
        "q": jax.device_put(normal(64, 16, seed=1), sharding),
        "r": q.with_sharding(NamedSharding(mesh, P(None, "b"))),
        "keys": jax.device_put(jr.split(jr.key(1), 4), along),
        "none": normal(64, 16, seed=1),
    }
    save(path, tree)
    loaded = load(path, like=like)
    assert loaded["dense"].sharding == sharding
    assert bits(loaded["dense"]) == bits(w)
    assert same(loaded["q"], q.with_sharding(sharding))
    assert loaded["q"].placement == sharding
    assert loaded["q"].stored["codes"].sharding.spec == P("a", "b")
    assert loaded["r"].placement.spec == P(None, "b")
    assert same(loaded["r"].with_sharding(None), q)
    assert loaded["keys"].sharding.is_equivalent_to(along, 1)
    assert bits(loaded["keys"]) == bits(keys)
    # The same array, but placed in another way.
    assert isinstance(loaded["none"].sharding, SingleDeviceSharding)


def test_placement_that_would_split_a_block(tmp_path):
    path = tmp_path / "model.safetensors"
    save(path, {"w": eqq.quantize(normal(64, 16), eqq.NF4(32))})
    like = jax.device_put(normal(64, 16, seed=1), NamedSharding(mesh, P("a")))
    with pytest.raises(ValueError, match="`w` could not be placed.*through a block"):
        load(path, like={"w": like})


def test_what_is_declared_is_kept_where_like_says_nothing(tmp_path):
    path = tmp_path / "model.safetensors"
    q = eqq.quantize(normal(64, 16), "nf4").with_sharding(P(None, "b"))
    save(path, [q])
    assert same(load(path, like=[normal(64, 16, seed=1)]), [q])
