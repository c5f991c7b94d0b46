"""GGUF files, whose arrays are quantized already: kept, decoded, quantized again."""

import gguf
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant._cli import main
from eqquant._cli._eqx_zoo import config_of_gguf, renaming
from eqquant.interop import convert

from ..helpers import normal
from . import files, llama
from .same import same


@pytest.fixture(scope="module")
def packed(tmp_path_factory):
    arrays, metadata = llama.to_gguf(llama.Llama(jr.key(0)), eqq.formats.Q4_0())
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    types = {"file_type": 2, "alignment": 64, "quantization_version": 2}
    metadata |= {f"general.{key}": x for key, x in types.items()}
    interop.write_gguf(path, arrays, metadata)
    return path


def _decoded(path):
    """The matrices in a file, by the package of llama.cpp."""
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
    }


def test_quantized_already(packed, tmp_path, capsys):
    out = tmp_path / "out.gguf"
    for kwargs in (dict(format="q8_0"), dict(format=None, rules=[("*", "int4")])):
        with pytest.raises(ValueError, match="'.*' in Q4_0.*--requantize"):
            convert(packed, out, **kwargs)
    assert main(["quantize", str(packed), str(out), "--format", "q8_0"]) == 2
    assert "--requantize" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    # What is in the format already is as it should be; and so is what no one asked for.
    outcomes = convert(packed, out, "q4_0")
    assert not any(x.hint for x in outcomes if x.reason == "quantized already")
    convert(packed, tmp_path / "copy.gguf", None)
    assert (tmp_path / "copy.gguf").read_bytes() == out.read_bytes()
    found, expected = _decoded(out), _decoded(packed)
    assert all(np.array_equal(found[name], x) for name, x in expected.items())


def test_quantized_in_part(tmp_path, capsys):
    arrays = {"a": eqq.quantize(normal(64, 64), "q4_0", axis=-1), "b": normal(64, 64)}
    interop.write_gguf(tmp_path / "a.gguf", arrays)
    argv = ["quantize", str(tmp_path / "a.gguf"), str(tmp_path / "b.gguf")]
    assert main([*argv, "--format", "q8_0"]) == 0
    text = capsys.readouterr().out
    assert "Quantized already, and left as is: 1 array, such as a → --req" in text
    found = interop.open(tmp_path / "b.gguf")
    assert same(found["a"], arrays["a"])
    assert found["b"].format == eqq.formats.Q8_0()


@pytest.mark.parametrize(
    "name, shard_size", [("out", None), ("out", 200_000), ("out.safetensors", None)]
)
def test_metadata_are_kept(packed, name, shard_size, tmp_path):
    out = tmp_path / name
    convert(packed, out, "nf4", requantize=True, shard_size=shard_size)
    with interop.open(packed) as before, interop.open(out) as after:
        assert before.metadata.items() <= after.metadata.items()
        assert config_of_gguf(after) == config_of_gguf(before)
        rename = renaming(after)
        assert rename == renaming(before)
        assert same(
            after["blk.0.attn_q.weight"],
            eqq.quantize(before["blk.0.attn_q.weight"].dequantize(), "nf4", axis=-1),
        )
        # Into a model with the names of Hugging Face, less their first.
        rules = ["llama", {"model.*": "*"}]
        model = interop.load_into(llama.Llama(jr.key(1)), after, rules)
        x = model.layers[0].self_attn.q_proj.weight
        assert same(x, after["blk.0.attn_q.weight"])
    tree = eqq.load(out)
    assert eqq.is_quantized(tree["blk"][0]["attn_q"]["weight"])
    # And back, with other weights in the same places.
    back = tmp_path / "back.gguf"
    convert(out, back, "q4_0", requantize=True)
    with interop.open(packed) as before, interop.open(back) as after:
        assert after.metadata == before.metadata
    name = "blk.0.attn_q.weight"
    error = _decoded(back)[name] - _decoded(packed)[name]
    assert np.sqrt(np.mean(error**2)) < 0.2 * np.std(_decoded(packed)[name])


def test_metadata_that_are_lost(packed, tmp_path, capsys):
    out = tmp_path / "out.safetensors"
    convert(packed, out, None)
    beside = tmp_path / "out.metadata.gguf"
    assert main(["inspect", str(out)]) == 0
    assert "general.architecture: 'llama'" in capsys.readouterr().out
    beside.unlink()
    eqq.load(out)
    with pytest.warns(UserWarning, match="'out.metadata.gguf', which is not beside"):
        interop.open(out)


@pytest.mark.parametrize("name, dtype", [("f32", None), ("BF16", jnp.bfloat16)])
def test_back_to_dense(name, dtype, packed, tmp_path):
    outcomes = convert(packed, tmp_path / "a.gguf", name)
    assert not any(x.format for x in outcomes)
    found, expected = _decoded(tmp_path / "a.gguf"), _decoded(packed)
    for key, x in expected.items():
        y = x if dtype is None else x.astype(dtype).astype(np.float32)
        assert np.array_equal(found[key], y if x.ndim == 2 else x)
    kinds = {
        x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "a.gguf").tensors
    }
    wanted = "F32" if dtype is None else "BF16"
    assert {k for key, k in kinds.items() if "norm" not in key} == {wanted}
    assert kinds["output_norm.weight"] == "F32"


def test_some_back_to_dense(packed, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ValueError, match="cannot be written for compressed.*=bf16'"):
        convert(packed, out, "int8", to="compressed-tensors", requantize=True)
    rules = [("token_embd*", "f16"), ("output_norm*", "bf16"), ("output.*", False)]
    convert(packed, out, None, rules=rules)
    found, source = interop.open(out), interop.open(packed)
    embedding = source["token_embd.weight"].dequantize()
    assert same(found["token_embd.weight"], embedding.astype(jnp.float16))
    assert found["output_norm.weight"].dtype == jnp.bfloat16
    # `None` and `False` copy.
    assert same(found["output.weight"], source["output.weight"])
    assert same(found["blk.0.ffn_up.weight"], source["blk.0.ffn_up.weight"])
    rules = [("token_embd*", "f16")]
    args = dict(format="int8", rules=rules, to="compressed-tensors", requantize=True)
    convert(packed, tmp_path / "other", **args)
    assert interop.open(tmp_path / "other").kind == "compressed-tensors"


def test_too_large_for_a_dtype(tmp_path):
    w = np.ones((64, 64), np.float32)
    w[0, :2] = 1e6
    files.save(tmp_path / "a.safetensors", {"w": w})
    with pytest.raises(ValueError, match="'w'.*too large for float16: 2 of 4096"):
        convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "f16")
    convert(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "bf16")
    x = interop.open(tmp_path / "b.safetensors")["w"]
    assert np.array_equal(x, w.astype(jnp.bfloat16))


# All at once, with a way out.
def test_arrays_that_do_not_fit(tmp_path):
    arrays = {
        f"layers.{i}.{name}.weight": np.asarray(normal(64, size))
        for i in range(3)
        for name, size in (("up", 96), ("down", 256), ("out", 64))
    }
    files.save(tmp_path / "a.safetensors", arrays)
    with pytest.raises(ValueError) as e:
        convert(tmp_path / "a.safetensors", tmp_path / "b.gguf", "q4_k")
    first, *lines = str(e.value).splitlines()
    assert first == "6 arrays cannot be written."
    assert [line.split()[3] for line in lines] == [
        "'layers.*.up.weight',", "'layers.*.out.weight',"
    ]  # fmt: skip
    assert all("a multiple of 256" in line for line in lines)
    assert "--rule 'layers.*.up.weight=q8_0'" in lines[-1]
    rules = [("*.up.*", "q8_0"), ("*.out.*", "q5_0")]
    convert(tmp_path / "a.safetensors", tmp_path / "b.gguf", "q4_k", rules=rules)
    kinds = {
        x.name: x.tensor_type.name for x in gguf.GGUFReader(tmp_path / "b.gguf").tensors
    }
    assert kinds["layers.2.down.weight"] == "Q4_K"
    assert kinds["layers.2.up.weight"] == "Q8_0"
    q = {k: eqq.quantize(x, "q4_k", axis=-1) for k, x in arrays.items()}
    with pytest.raises(ValueError, match="6 arrays cannot be written"):
        interop.write_gguf(tmp_path / "c.gguf", q)
