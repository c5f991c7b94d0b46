"""`write` to a folder that has another model."""

import json
import os
import shutil

import jax.numpy as jnp
import mlx.core as mx
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from ..helpers import normal
from . import files
from .arrays import quantized
from .killed import killed


_minimum = eqq.Int(4, 64, offset="minimum")
_half = jnp.float16
_config = {"model_type": "test", "tie_word_embeddings": True}


def _many(folder):
    """A dense model in two files."""
    folder.mkdir()
    arrays = {f"{i}.weight": np.asarray(normal(32, 128)) + i for i in range(2)}
    names = [f"model-0000{i + 1}-of-00002.safetensors" for i in range(2)]
    for name, key in zip(names, arrays):
        files.save(folder / name, {key: arrays[key]})
    index = {"metadata": {}, "weight_map": dict(zip(arrays, names))}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text(json.dumps(_config))


def _one(layout, format):
    def make(folder):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(_config))
        arrays = {"0.weight": quantized(format, 32, 128, dtype=_half)}
        interop.write(folder, arrays, layout)

    return make


_gptq = _one("gptq", eqq.Int(2, 32, scale_dtype=_half))
_mlx = _one("mlx", eqq.Int(8, 32, offset="minimum", scale_dtype=_half))


def _written(q, layout):
    return lambda folder: interop.write(folder, {"0.weight": q}, layout)


_models = {
    "mlx": _written(quantized(_minimum, 32, 128), "mlx"),
    "gptq": _written(quantized(eqq.Int4(32, scale_dtype=_half), 32, 128), "gptq"),
    "dense": _written(normal(32, 128), "mlx"),
}


def _read(folder):
    with interop.open(folder) as checkpoint:
        dense = {
            name: np.asarray(x.dequantize() if eqq.is_quantized(x) else x)
            for name, x in checkpoint.items()
        }
        return {k: x.astype(np.float32).tobytes() for k, x in dense.items()}


def _sections(folder):
    path = folder / "config.json"
    config = json.loads(path.read_text()) if path.is_file() else {}
    return {key for key in config if "quantization" in key}


@pytest.mark.parametrize("after", _models)
@pytest.mark.parametrize("before", [_many, _gptq, _mlx], ids=["many", "gptq", "mlx"])
def test_killed_at_every_step(before, after, tmp_path):
    write = _models[after]
    write(tmp_path / "expected")
    expected = _read(tmp_path / "expected")
    before(tmp_path / "old")
    old = _read(tmp_path / "old")
    assert old != expected
    found = []
    for steps in range(100):
        folder = tmp_path / f"{steps}"
        shutil.copytree(tmp_path / "old", folder)
        was_killed = killed(lambda: write(folder), folder, steps)
        try:
            found.append(_read(folder))
        except ValueError as e:
            assert "Write it again" in str(e)
            found.append(None)
        assert found[-1] in (old, expected, None)
        if not was_killed:
            break
        write(folder)
        _is_this_model(folder, expected, after)
    assert len(found) > 3 and found[0] == old
    assert found[-1] == expected
    _is_this_model(folder, expected, after, whole=True)


def _is_this_model(folder, expected, layout, whole=False):
    assert _read(folder) == expected
    names = {name for name in os.listdir(folder) if not name.startswith(".")}
    assert names == {"config.json", "model.safetensors"}
    assert whole is False or len(os.listdir(folder)) == 2
    config = json.loads((folder / "config.json").read_text())
    assert {key: config[key] for key in _config} == _config
    section = {"mlx": {"quantization"}, "gptq": {"quantization_config"}}
    assert _sections(folder) == section.get(layout, set())
    if layout == "mlx":
        # As mlx-lm opens a folder: all files of these names.
        arrays: dict = {}
        for path in folder.glob("model*.safetensors"):
            arrays |= mx.load(str(path))  # pyright: ignore
        w = mx.dequantize(
            *(arrays[f"0.{x}"] for x in ("weight", "scales", "biases")),
            **{k: config["quantization"][k] for k in ("group_size", "bits")},
        )
        assert np.array(w, np.float32).tobytes() == expected["0.weight"]


# Errors that are no kill leave the old model, as long as the new one is not in place.
@pytest.mark.usefixtures("systems")
@pytest.mark.parametrize("name, most", [("fsync", 3), ("chmod", 2), ("replace", 2)])
def test_errors_at_every_step(name, most, tmp_path, monkeypatch):
    _mlx(tmp_path / "old")
    before = {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()}
    function = getattr(os, name)
    for i in range(most):
        folder = tmp_path / f"{i}"
        shutil.copytree(tmp_path / "old", folder)
        calls = []

        def fail(*args, **kwargs):
            calls.append(args)
            if len(calls) == i + 1:
                raise OSError("full")
            return function(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, name, fail)
            with pytest.raises(OSError, match="full"):
                _models["gptq"](folder)
        assert len(calls) > i
        assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


# A model that is read from the folder while it is written there.
def test_in_its_own_place(tmp_path):
    folder = tmp_path / "a"
    _many(folder)
    expected = _read(folder)
    with interop.open(folder) as checkpoint:
        interop.write(folder, checkpoint, "mlx")
        # The files that were opened are still those.
        assert set(checkpoint) == set(expected)
        assert np.asarray(checkpoint["1.weight"]).tobytes() == expected["1.weight"]
    assert _read(folder) == expected
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


@pytest.mark.usefixtures("systems")
def test_parts_of_others(tmp_path):
    folder = tmp_path / "a"
    _many(folder)
    (folder / "model.safetensors.index.json").rename(
        folder / "other.safetensors.index.json"
    )
    before = sorted(os.listdir(folder))
    with pytest.raises(ValueError, match="'other.safetensors.index.json'.*Move"):
        _models["mlx"](folder)
    (folder / "other.safetensors.index.json").unlink()
    with pytest.raises(ValueError, match="'model-00001-of-00002.safetensors'.*Move"):
        _models["mlx"](folder)
    assert sorted(os.listdir(folder)) == before[:-1]
    # What is no part of a model stays.
    for path in folder.glob("*.safetensors"):
        path.replace(folder / "adapter.safetensors")
    _models["mlx"](folder)
    assert (folder / "adapter.safetensors").is_file()


@pytest.mark.parametrize(
    "section",
    [
        {"quantization_config": {"quant_method": "gptq", "bits": 2, "group_size": 128}},
        {"quantization_config": {"quant_method": "awq", "bits": 8, "group_size": 32}},
        {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
        {"compression_config": {"quant_method": "compressed-tensors"}},
    ],
)
def test_old_sections(section, tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    for name in ("quantize_config.json", "quant_config.json"):
        (folder / name).write_text(json.dumps({"bits": 2, "group_size": 128}))
    (folder / "config.json").write_text(json.dumps(_config | section))
    q = quantized(_minimum, 64, 128)
    interop.write(folder, {"a.weight": q}, "mlx")
    assert interop.open(folder)["a.weight"].format == _minimum
    config = json.loads((folder / "config.json").read_text())
    assert config.keys() == {*_config, "quantization"}
    assert sorted(os.listdir(folder)) == ["config.json", "model.safetensors"]


# A file beside which its own configuration is.
@pytest.mark.usefixtures("systems")
def test_a_file(tmp_path):
    path = tmp_path / "model.safetensors"
    q = quantized(_minimum, 32, 128)
    interop.write(path, {"0.weight": quantized(eqq.MXFP4(), 32, 128)}, "mlx")
    beside = tmp_path / "model.config.json"
    beside.write_text(json.dumps(json.loads(beside.read_text()) | {"mine": 1}))
    interop.write(path, {"0.weight": normal(32, 128)}, "mlx")
    assert json.loads(beside.read_text()) == {"mine": 1}
    # It would win over that of the folder.
    interop.write(tmp_path, {"0.weight": q}, "mlx")
    assert interop.open(tmp_path)["0.weight"].format == _minimum
    assert not beside.exists()
    assert json.loads((tmp_path / "config.json").read_text())["mine"] == 1


# As for other libraries, a whole file comes before an index, which may be of a model
# that was there before.
def test_a_whole_file_beside_an_index(tmp_path):
    _many(tmp_path / "a")
    eqq.save(tmp_path / "a" / "model.safetensors", {"b": jnp.ones(4)})
    with interop.open(tmp_path / "a") as found:
        assert [*found] == ["b"]
    (tmp_path / "a" / "model-00001-of-00002.safetensors").unlink()
    assert [*eqq.load(tmp_path / "a" / "model.safetensors")] == ["b"]


def test_names_with_dots(tmp_path):
    q = quantized(_minimum, 32, 128)
    interop.write(tmp_path / "Qwen2.5-0.5B", {"0.weight": q}, "mlx")
    assert (tmp_path / "Qwen2.5-0.5B" / "model.safetensors").is_file()
