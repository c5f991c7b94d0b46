import json
import os

import equinox as eqx
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant.interop import convert

from ..helpers import normal
from . import large
from .same import same


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convert") / "model"
    large.write(folder, 64, 96, 1, 64)
    return folder


def _quantized(source, format="nf4", dense=("embed", "norm")):
    """What is expected, by names."""
    arrays = dict(interop.open(source))
    return {
        name: x
        if any(word in name for word in dense)
        else eqq.quantize(x, format, axis=-1)
        for name, x in arrays.items()
    }


def _at(tree, name):
    for key in name.split("."):
        tree = tree[int(key) if isinstance(tree, list) else key]
    return tree


def test_the_file_that_save_writes(source, tmp_path):
    # Of several files, one; whose tree has the layers as a list.
    out = tmp_path / "out.safetensors"
    outcomes = convert(source, out, "nf4", rules=[("*.embed*", "int8")])
    expected = _quantized(source, dense=("norm",))
    name = "model.embed_tokens.weight"
    w = interop.open(source)[name]
    expected[name] = eqq.quantize(w, "int8", axis=-1)
    tree = eqq.load(out)
    assert isinstance(tree["model"]["layers"], list)
    assert all(same(_at(tree, name), x) for name, x in expected.items())
    # Quantized arrays lie in rows there, and as in memory in the files of `save`.
    saved = tmp_path / "saved.safetensors"
    eqq.save(saved, eqq.tree_prepack(tree, platform="gpu"))
    assert out.read_bytes() == saved.read_bytes()

    found = {outcome.name: outcome for outcome in outcomes}
    assert found.keys() == expected.keys()
    assert found["lm_head.weight"].bits_per_weight == 4.5
    ratio = eqq.report({"w": expected[name]}, {"w": w}).rows[0].sqnr
    assert ratio is not None
    assert np.isclose(found[name].sqnr, ratio, atol=1e-3)
    norm = found["model.norm.weight"]
    assert (norm.format, norm.sqnr, norm.reason) == (None, None, "a vector")


def test_several_files(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "int8", shard_size=20_000)
    expected = _quantized(source, "int8")
    names = [name for name in os.listdir(out) if name.startswith("model-")]
    assert len(names) > 2
    # An array may be larger than what a file is to have.
    assert sum((out / name).stat().st_size > 22_000 for name in names) <= 2
    assert json.loads((out / "config.json").read_text())["hidden_size"] == 64
    index = out / "model.safetensors.index.json"
    for path in (out, index):
        tree = eqq.load(path)
        assert all(same(_at(tree, name), x) for name, x in expected.items())
        checkpoint = interop.open(path)
        assert checkpoint.kind == "eqquant"
        assert set(checkpoint) == set(expected)
        assert all(same(checkpoint[name], x) for name, x in expected.items())
    for read in (eqq.load, interop.open):
        with pytest.raises(ValueError, match="one of several files.*index.json"):
            read(out / names[0])
    index.unlink()
    with pytest.raises(ValueError, match="one of several files.*index.json"):
        eqq.load(out)


class _Model(eqx.Module):
    model: dict
    lm_head: eqx.nn.Linear


def test_into_a_model(source, tmp_path):
    out = tmp_path / "out"
    convert(source, out, "nf4")
    tree = eqq.tree_dequantize(eqq.load(out))
    head = eqx.nn.Linear(64, 64, use_bias=False, key=jr.key(0))
    like = _Model(tree["model"], head)
    model = eqq.load(out, like=like)
    expected = _quantized(source)["lm_head.weight"]
    assert same(model.lm_head.weight, expected)
    x = normal(64)
    assert np.array_equal(model.lm_head(x), expected @ x)
