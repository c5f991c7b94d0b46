"""A model whose modules run as by `implicit` loads into a dense one."""

import json
import zlib
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
import jax.tree_util as jtu
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import eqquant as eqq

from ..helpers import normal
from .same import same


class Logits(eqx.Module):
    """Has a method, next to its call, that needs a dense array."""

    table: jax.Array

    def logits(self, x):
        return jnp.dot(x, self.table)

    def __call__(self, x):
        return jax.nn.softmax(self.logits(x))


class Net(eqx.Module):
    layers: list[eqx.nn.Conv1d]
    named: dict[str, eqx.nn.Linear]
    head: Logits
    activation: Callable[[jax.Array], jax.Array]

    def __init__(self, key):
        keys = jr.split(key, 4)
        self.layers = [eqx.nn.Conv1d(4, 4, 3, key=key) for key in keys[:2]]
        self.named = {"a.b": eqx.nn.Linear(16, 16, key=keys[2])}
        self.head = Logits(jr.normal(keys[3], (16, 8)))
        self.activation = jax.nn.relu

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x))
        return self.head.logits(self.named["a.b"](x.reshape(-1)))


x = normal(4, 8)
make = lambda seed: Net(jr.key(seed))
kinds = {
    "example": {"example": x},
    "on_call": {"unsupported": "on_call"},
    "none": {},
}
likes = {
    "dense": lambda: make(1),
    "skeleton": lambda: eqx.filter_eval_shape(make, 1),
    "example": lambda: eqq.tree_quantize(make(1), "int8", min_size=0, example=x),
}


@pytest.fixture(params=kinds)
def saved(request, tmp_path):
    path, kwargs = tmp_path / "model.safetensors", kinds[request.param]
    rules = eqq.Rules([("head*", "int8" if request.param == "example" else None)])
    rules = eqq.Rules([*rules.rules, ("*", "int8")])
    model = eqq.tree_quantize(make(0), rules, min_size=0, **kwargs)
    eqq.save(path, model)
    return path, model


@pytest.mark.parametrize("like", likes)
@pytest.mark.filterwarnings("ignore:Only:UserWarning")
def test_loads_as_it_ran(saved, like):
    path, model = saved
    loaded = eqq.load(path, like=likes[like]())
    if like == "example":
        # (What `like` runs on call besides, it goes on to.)
        assert isinstance(loaded, Net)
    else:
        # The classes of modules are part of the structure.
        assert jtu.tree_structure(loaded) == jtu.tree_structure(model)
        assert same(loaded, model)
    y = eqx.filter_jit(model)(x)
    np.testing.assert_array_equal(eqx.filter_jit(loaded)(x), y)
    again = path.with_name("again.safetensors")
    eqq.save(again, loaded)
    if like != "example":
        assert again.read_bytes() == path.read_bytes()


def header(path):
    with safe_open(path, "numpy") as file:
        return file.metadata()


def test_a_module_twice(tmp_path):
    conv = eqx.nn.Conv1d(4, 4, 3, key=jr.key(0))
    model = eqq.tree_quantize([conv, conv], "int8", min_size=0, unsupported="on_call")
    eqq.save(tmp_path / "a", model)
    loaded = eqq.load(tmp_path / "a", like=[conv, conv])
    assert jtu.tree_structure(loaded) == jtu.tree_structure(model)
    # A `like` of other classes is taken as it is.
    loaded = eqq.load(tmp_path / "a", like=[Fields(conv.weight, conv.bias)] * 2)
    assert type(loaded[0]) is Fields and eqq.is_quantized(loaded[0].weight)
    assert eqq.load(tmp_path / "a")[1]["bias"].shape == (4, 1)


class Fields(eqx.Module):
    weight: jax.Array
    bias: jax.Array | None


def changed(path, change):
    """The file with another header. Its checksum is right."""
    metadata = header(path)
    layout = json.loads(metadata["eqquant"])
    change(layout)
    text = json.dumps(layout)
    metadata |= {"eqquant": text, "eqquant.crc32": f"{zlib.crc32(text.encode()):08x}"}
    save_file(load_file(path), path, metadata)


@pytest.mark.parametrize(
    "value", (3, [3], [["a", 1]], [[["a"], "yes"]], [[[{}], True]], {"a": 1})
)
def test_damaged(tmp_path, value):
    path = tmp_path / "model.safetensors"
    eqq.save(path, {"a": normal(3)})
    changed(path, lambda layout: layout.update(on_call=value))
    with pytest.raises(ValueError, match="metadata is damaged"):
        eqq.load(path)


def test_files_of_earlier_versions(tmp_path):
    path, like = tmp_path / "model.safetensors", likes["example"]()
    eqq.save(path, like)
    changed(path, lambda layout: layout.pop("on_call"))
    assert same(eqq.load(path, like=like), like)
    assert jtu.tree_structure(eqq.load(path, like=like)) == jtu.tree_structure(like)
