import filecmp

import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop
from eqquant._cli import main

from . import folders, llama
from .llama_files import fields_of, llama3, tensors_of, written


def test_another_output_than_the_embedding(tmp_path):
    # A tied one is left out, even if a file has it.
    path = written(folders.write(tmp_path / "a", "Llama", tie_word_embeddings=True))
    assert "output.weight" not in interop.open(path)
    arrays = folders.arrays("Gemma")
    head = {"lm_head.weight": arrays["model.embed_tokens.weight"]}
    folder = folders.write(tmp_path / "b", "Gemma")
    interop.write_gguf(path, arrays | head, config=folder)
    assert "output.weight" not in interop.open(path)
    folder = folders.write(tmp_path / "c", "Qwen2")
    arrays = folders.arrays("Qwen2")
    del arrays["lm_head.weight"]
    with pytest.raises(ValueError, match="should be 'lm_head.weight' .'output.weight'"):
        interop.write_gguf(path, arrays, config=folder)


@pytest.mark.thorough
def test_a_model_of_equinox(tmp_path):
    model = llama.Llama(jr.key(0))
    shape = {
        "hidden_size": llama.size,
        "intermediate_size": llama.wide,
        "num_hidden_layers": llama.depth,
        "num_attention_heads": llama.heads["q"],
        "num_key_value_heads": llama.heads["k"],
        "head_dim": ...,
        "vocab_size": llama.vocabulary,
    }
    folder = folders.write(tmp_path / "a", "Llama", **shape)
    quantized = eqq.tree_quantize(model, "q4_k", axis=-1)
    path = tmp_path / "a.gguf"
    interop.write_gguf(path, quantized, config=folder)
    fields = fields_of(path)
    assert fields["general.file_type"] == 14
    assert fields["general.quantization_version"] == 2
    types = {name: kind for name, (kind, _) in tensors_of(path).items()}
    assert types["token_embd.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.ffn_down.weight"] == "Q4_K"
    checkpoint = interop.open(path)
    again = interop.load_into(model, checkpoint, rename=["llama", ("model.*", "*")])
    tokens = jnp.arange(7)
    np.testing.assert_array_equal(again(tokens), quantized(tokens))


def test_from_another_file(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", rope_scaling=llama3)
    path = written(folder)
    again = tmp_path / "b.gguf"
    with interop.open(path) as checkpoint:
        interop.write_gguf(again, checkpoint, config=checkpoint)
    assert filecmp.cmp(path, again, shallow=False)
    # And of arrays by other names, without the frequencies.
    interop.write_gguf(again, interop.open(folder), config=path)
    assert fields_of(again) == fields_of(path)
    names = [x for x in interop.open(path)]
    other = interop.open(again)
    assert set(names) == set(other)
    for name in names:
        np.testing.assert_array_equal(interop.open(path)[name], other[name])
    # Norms have one added once.
    path = written(folders.write(tmp_path / "c", "Gemma2"))
    interop.write_gguf(again, interop.open(path), config=path)
    assert filecmp.cmp(path, again, shallow=False)


def test_an_architecture_that_is_only_known_to_llama_cpp(tmp_path):
    path, again = tmp_path / "a.gguf", tmp_path / "b.gguf"
    metadata = {"general.architecture": "olmo2", "general.file_type": 7, "olmo2.a": 1}
    interop.write_gguf(path, {"x": jnp.ones((2, 2), jnp.float16)}, metadata)
    interop.write_gguf(again, {"y": jnp.ones((2, 2), jnp.float16)}, config=path)
    assert fields_of(again) == metadata | {"general.file_type": 1}


def test_convert(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", rope_scaling=llama3)
    path, other = written(folder), tmp_path / "b.gguf"
    outcomes = interop.convert(folder, other, None)
    assert [x.name for x in outcomes] == list(folders.shapes("Llama"))
    assert fields_of(path) == fields_of(other)
    ours, theirs = interop.open(path), interop.open(other)
    assert set(ours) == set(theirs)
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name], strict=True)

    third = tmp_path / "c.gguf"
    rules = [("lm_head.*", "q5_1"), ("*.mlp.*", None)]
    interop.convert(folder, third, "q8_0", rules=rules, min_size=0)
    types = {name: kind for name, (kind, _) in tensors_of(third).items()}
    assert types["output.weight"] == "Q5_1" and types["blk.1.attn_q.weight"] == "Q8_0"
    assert types["blk.1.ffn_up.weight"] == types["token_embd.weight"] == "F32"
    assert "rope_freqs.weight" in types
    w = interop.open(folder)["model.layers.0.self_attn.k_proj.weight"]
    q = eqq.quantize(w, "q8_0", axis=-1).dequantize()
    found = interop.open(third)["blk.0.attn_k.weight"].dequantize()
    np.testing.assert_array_equal(q, found)

    bare = tmp_path / "d.gguf"
    interop.convert(folder, bare, None, config=False)
    assert list(interop.open(bare)) == list(folders.shapes("Llama"))
    assert interop.open(bare).metadata == {}
    with pytest.raises(ValueError, match="`config` is for GGUF files"):
        interop.convert(folder, tmp_path / "e", None, config=folder)


def test_convert_to_other_types(tmp_path):
    path = written(folders.write(tmp_path / "a", "Qwen2"))
    again = tmp_path / "b.gguf"
    interop.convert(path, again, "q4_0", embeddings=True, min_size=0)
    before, after = fields_of(path), fields_of(again)
    types = {"general.file_type": 2, "general.quantization_version": 2}
    assert after == before | types
    split = tmp_path / "split"
    interop.convert(path.with_suffix(""), split, None, to="gguf", shard_size=9000)
    assert len(list(split.glob("*.gguf"))) > 1
    assert set(interop.open(split)) == set(interop.open(path))


def test_command(tmp_path, capsys):
    folder = folders.write(tmp_path / "a", "Llama")

    def run(*args):
        try:
            status = main(["quantize", *map(str, args)])
        except SystemExit as e:
            status = e.code
        return status, capsys.readouterr().err

    path = tmp_path / "b.gguf"
    options = ("--format", "q8_0", "--min-size", "0")
    assert run(folder, path, *options) == (0, "")
    assert fields_of(path)["general.file_type"] == 7
    bare = tmp_path / "c.gguf"
    assert run(folder, bare, *options, "--bare") == (0, "")
    assert fields_of(bare) == {}
    again = tmp_path / "d.gguf"
    assert run(folder / "model.safetensors", again, "--config", path, *options)[0] == 0
    assert fields_of(again) == fields_of(path)
    (folder / "tokenizer.json").unlink()
    code, error = run(folder, tmp_path / "e.gguf")
    assert code == 2 and "should have a 'tokenizer.json' or a 'tokenizer.mod" in error
    assert "--bare" in error and not (tmp_path / "e.gguf").exists()


def test_metadata_overrides(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    (folder / "tokenizer.json").unlink()
    own = {"tokenizer.ggml.model": "none", "general.name": "b", "general.file_type": 7}
    found = fields_of(written(folder, metadata=own))
    assert found | own == found
    assert not {"tokenizer.ggml.tokens", "tokenizer.ggml.pre"} & set(found)


def test_names_that_are_changed(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    arrays = {f"net.{name}": x for name, x in folders.arrays("Llama").items()}
    arrays["net.other"] = np.ones(3, np.float32)
    path = tmp_path / "a.gguf"
    rename = {"net.other": None, "net.*": "*"}
    interop.write_gguf(path, arrays, config=folder, rename=rename)
    assert "blk.1.ffn_up.weight" in interop.open(path)
    with pytest.raises(ValueError, match="'a' has no place.*'llama'"):
        interop.write_gguf(
            path, arrays, config=folder, rename={"net.other": "a", "net.*": "*"}
        )
