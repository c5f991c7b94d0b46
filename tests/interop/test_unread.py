"""Quantized arrays that no layout reads are refused by their method's name, and are
listed; arrays that only look like parts of such are ordinary."""

import ml_dtypes
import numpy as np
import pytest

from eqquant import interop
from eqquant._cli import main

from . import files, fuzz_parts


_float8 = ml_dtypes.float8_e4m3fn
_rng = np.random.default_rng(0)
_bytes = _rng.integers(0, 256, (64, 64)).astype(np.uint8)
_half = _rng.standard_normal((64, 64)).astype(np.float16)
_norm = np.ones(64, np.float16)


def _method(name):
    return {"quantization_config": {"quant_method": name}}


# The tensors of `p`, what config.json says, and what the error names.
_unknown = {
    "hqq": (
        {"W_q": _bytes, "scale": _half, "zero": _half, "bias": _norm},
        _method("hqq"),
        "'hqq'",
    ),
    "hqq-alone": (
        {"W_q": _bytes.astype(np.int32), "scale": _half, "zero": _half},
        None,
        "HQQ",
    ),
    "quanto": (
        {"weight._data": _bytes.view(np.int8), "weight._scale": _half[:, :1]},
        None,
        "weight._scale",
    ),
    "eetq": (
        {"weight": _bytes.view(np.int8), "weight_scales": _half[0]},
        _method("eetq"),
        "'eetq'",
    ),
    "eetq-alone": (
        {"weight": _bytes.view(np.int8), "weight_scales": _half[0]},
        None,
        "EETQ",
    ),
    "comfyui": (
        {"weight": _half.astype(_float8), "scale_weight": _norm[:1].astype("f4")},
        None,
        "ComfyUI",
    ),
    "vptq": (
        {
            "indices": _bytes.astype(np.int32),
            "centroids": _half,
            "weight_scale": _half[0],
            "weight_bias": _half[0],
        },
        _method("vptq"),
        "'vptq'",
    ),
    "aqlm": (
        {"codes": _bytes.view(np.int8), "codebooks": _half, "scales": _half[:, :1]},
        _method("aqlm"),
        "'aqlm'",
    ),
    "sparse": (
        {
            "weight.compressed": _half[0],
            "weight.bitmask": _bytes[:, :8],
            "weight.row_offsets": np.arange(64, dtype=np.int32),
            "weight.shape": np.array([64, 64], np.int32),
        },
        _method("compressed-tensors"),
        "'compressed-tensors'",
    ),
    "scaled inputs": (
        {
            "weight": _half.astype(_float8),
            "weight_scale": np.ones((), np.float32),
            "pre_quant_scale": _norm,
        },
        _method("modelopt"),
        "'modelopt'",
    ),
}


@pytest.mark.parametrize("kind", _unknown)
def test_methods_that_are_not_read(kind, tmp_path, capsys):
    tensors, config, match = _unknown[kind]
    arrays = {f"p.{name}": x for name, x in tensors.items()} | {"norm.weight": _norm}
    files.save(tmp_path / "model.safetensors", arrays, config)
    with interop.open(tmp_path) as checkpoint:
        refused = set()
        for name, entry in checkpoint.entries.items():
            try:
                checkpoint[name]
            except ValueError as e:
                refused.add(name)
                assert f"Could not read {name!r}: it is a part of a quant" in str(e)
                with pytest.raises(ValueError, match=match):
                    entry.numpy()
        ordinary = {"norm.weight", "p.bias", "p.weight_bias"}
        ordinary |= {n for n, e in checkpoint.entries.items() if e.format is not None}
        assert refused and set(checkpoint) - refused <= ordinary
        model = {"w": np.zeros((64, 64), np.float32)}
        rename = {next(iter(refused)): "w", "*": None}
        with pytest.raises(ValueError, match="cannot be read.*part of a quantized"):
            interop.load_into(model, checkpoint, rename)
    out = tmp_path / "out"
    assert main(["quantize", str(tmp_path), str(out), "--format", "int8"]) == 2
    assert "part of a quantized array" in capsys.readouterr().err
    assert not out.exists()
    # They are listed.
    assert main(["inspect", str(tmp_path)]) == 0
    assert next(iter(refused)) in capsys.readouterr().out


_ordinary = {
    "codes alone": {"w": _bytes, "weight": _bytes.view(np.int8)},
    "float8 alone": {"layers.0.weight": _half.astype(_float8), "layers.0.bias": _norm},
    "scales of floats": {
        **{"p.weight": _half, "p.scale": _norm, "p.weight_scale": _norm},
        **{"q.scale": _norm, "logit_scale": _norm[0], "q.zero_point": _norm},
    },
    "indices": {"x.position_ids": np.arange(9), "x.scale": _norm, "tokens": _bytes},
    "an image": {"image": _bytes, "scale": _norm},
    "a sample": {"a.weight": np.arange(9, dtype=np.int64), "a.count": _norm},
    "flat names": {"a": _bytes, "b_scale": _norm},
}


@pytest.mark.parametrize("kind", _ordinary)
def test_arrays_that_are_ordinary(kind, path):
    arrays = {
        k: x.astype(np.int32) if x.dtype == np.int64 else x
        for k, x in _ordinary[kind].items()
    }
    files.save(path, arrays)
    with interop.open(path) as checkpoint:
        for name, x in arrays.items():
            np.testing.assert_array_equal(np.asarray(checkpoint[name]), x)


@pytest.mark.parametrize("kind", _unknown)
def test_said_to_be_ordinary(kind, tmp_path):
    # As they are, also by the names in the errors, and of whatever layout.
    tensors, config, _ = _unknown[kind]
    arrays = {f"p.{name}": x for name, x in tensors.items()} | {"norm.weight": _norm}
    files.save(tmp_path / "model.safetensors", arrays, config)
    with interop.open(tmp_path) as checkpoint:
        for entry in checkpoint.entries.values():
            if entry.problem is not None:
                assert f"`ordinary=[{entry.name!r}, ...]`" in entry.problem
    for ordinary in (["*"], ["p.*"], list(arrays)):
        with interop.open(tmp_path, ordinary=ordinary) as checkpoint:
            assert checkpoint.kind == "safetensors"
            for name, x in arrays.items():
                found = checkpoint.entries[name].numpy()
                assert found.dtype == x.dtype
                np.testing.assert_array_equal(found, x)


def test_one_that_is_ordinary(tmp_path, capsys):
    scale = np.ones((64, 64), np.float32)
    arrays = {"x": _bytes, "x_scale": scale, "a.weight": np.float32(_half)}
    files.save(tmp_path / "a.safetensors", arrays)
    path, out = str(tmp_path / "a.safetensors"), str(tmp_path / "out")
    command = ["quantize", path, out, "--format", "int8"]
    assert main(command) == 2
    assert "--ordinary 'x'" in capsys.readouterr().err
    assert main([*command, "--ordinary", "x"]) == 0
    found = interop.open(out)
    assert found.entries["x"].dtype == np.uint8
    np.testing.assert_array_equal(found["x"], _bytes)
    assert found.entries["a.weight"].format == found.entries["x_scale"].format
    capsys.readouterr()
    assert main(["compare", path, out]) == 2
    assert main(["compare", path, out, "--ordinary", "x*"]) == 0
    assert "exact" in capsys.readouterr().out
    model = {name: np.zeros_like(x) for name, x in arrays.items()}
    with interop.open(path, ordinary=["x"]) as checkpoint:
        loaded = interop.load_into(model, checkpoint)
    np.testing.assert_array_equal(loaded["x"], _bytes)
    # Others of the file are quantized as before, and refused as before.
    more = {f"p.{name}": x for name, x in _unknown["eetq-alone"][0].items()}
    files.save(tmp_path / "b.safetensors", arrays | more)
    with interop.open(tmp_path / "b.safetensors", ordinary=["x"]) as checkpoint:
        problems = {k for k, e in checkpoint.entries.items() if e.problem is not None}
    assert problems == {"p.weight", "p.weight_scales"}


def test_ordinary_in_vain(tmp_path):
    files.save(tmp_path / "a.safetensors", {"images": _bytes, "scale": _norm})
    with pytest.raises(ValueError, match="no tensor is 'image', .*Is it 'images'"):
        interop.open(tmp_path / "a.safetensors", ordinary=["image"])
    with pytest.raises(TypeError, match="a list of names"):
        interop.open(tmp_path / "a.safetensors", ordinary="images")
    interop.convert(tmp_path / "a.safetensors", tmp_path / "b")
    with pytest.raises(ValueError, match="a file of eqquant, which declares"):
        interop.open(tmp_path / "b", ordinary=["images"])


def test_flat_names(path):
    arrays = {"a": _bytes, "a_scale": _norm, "logit_scale": _norm, "a.scale": _norm}
    files.save(path, arrays)
    with interop.open(path) as checkpoint:
        refused = {n for n, e in checkpoint.entries.items() if e.problem is not None}
    assert refused == {"a", "a_scale", "a.scale"}


@pytest.mark.parametrize("layout", fuzz_parts.layouts)
def test_parts_that_are_missing_or_renamed(layout, path):
    refused, accepted = fuzz_parts.check(path, layout)
    assert refused > 2 * accepted


# Some modules have parameters of these names.
def test_arrays_with_such_names(tmp_path):
    arrays = {
        "m.weight": np.ones((64, 128), np.float32),
        "rnn.biases": np.ones(4, np.float32),
        "graph.g_idx": np.arange(4),
        "graph.x": np.ones((4, 2), np.float32),
    }
    files.save(tmp_path / "a.safetensors", arrays)
    with interop.open(tmp_path / "a.safetensors") as found:
        for name in ("m.weight", "rnn.biases", "graph.x"):
            np.testing.assert_array_equal(found[name], arrays[name])
