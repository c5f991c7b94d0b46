import json
import sys
import types

import equinox as eqx
import jax
import jax.random as jr
import numpy as np
import pytest

from eqquant import interop
from eqquant._cli import _evaluate, main
from eqquant._cli._eqx_zoo import config_of_gguf
from eqquant._cli._evaluate import read_tokens

from .interop import families


def _mistake(capsys, *argv):
    assert main([str(x) for x in argv]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_tokens(tmp_path):
    path = tmp_path / "tokens.txt"
    for text in ("1 2\n3,4\n", "[1, 2, 3, 4]", "[[1, 2], [3, 4]]"):
        path.write_text(text)
        assert read_tokens(path).tolist() == [1, 2, 3, 4]
    np.save(tmp_path / "tokens.npy", np.array([1, 2, 3, 4], np.uint16))
    assert read_tokens(tmp_path / "tokens.npy").tolist() == [1, 2, 3, 4]
    assert read_tokens(tmp_path / "tokens.npy").dtype == np.int32


@pytest.mark.parametrize(
    "text, words",
    [
        ("1 two", "should have integers"),
        ("1", "two integers or more"),
        ("[1.5, 2]", "two integers or more"),
        ("1 -2", "numbers of tokens"),
        ("[" * 100_000, "should have integers"),
        ("9" * 5000, "should have integers"),
        (f"1 {2**80}", "two integers or more"),
    ],
)
def test_bad_tokens(text, words, tmp_path, capsys):
    path = tmp_path / "tokens.txt"
    path.write_text(text)
    assert words in _mistake(capsys, "evaluate", tmp_path / "no.gguf", path)


def test_bad_files_of_tokens(tmp_path, capsys):
    path = tmp_path / "tokens.npy"
    np.save(path, np.arange(4))
    # A header of more numbers than there are.
    text = path.read_bytes().replace(b"(4,), ", b"(1000000000000,), ")
    for content in (text[:-1], b"", text[:20], b"no array"):
        path.write_bytes(content)
        assert "is damaged" in _mistake(capsys, "evaluate", tmp_path / "no.gguf", path)
    path = tmp_path / "tokens.txt"
    path.write_bytes(b"1 2 \xff")
    line = _mistake(capsys, "evaluate", tmp_path / "no.gguf", path)
    assert "should have integers" in line and str(path) in line


_config = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": None,
    "vocab_size": 32,
}


class _Config:
    # As others do, it trusts its argument.
    @classmethod
    def from_hf(cls, found):
        if (scaling := found.get("rope_scaling")) is not None:
            scaling.get("rope_type")
        return cls()


def _model(config, *, key):
    raise RuntimeError("no configuration is right here")


@pytest.mark.parametrize(
    "config, words",
    [
        ({"num_attention_heads": 0}, "positive integer for num_attention_heads. Got 0"),
        ({"num_attention_heads": True}, "positive integer for num_attention_heads"),
        ({"hidden_size": "64"}, "positive integer for hidden_size. Got '64'"),
        ({"hidden_size": None}, "positive integer for hidden_size. Got None"),
        ({"vocab_size": 3}, "tokens up to 2. Got 3"),
        ({"rope_theta": "ten"}, "positive number for rope_theta"),
        ({"rope_scaling": [1]}, "AttributeError"),
        ({"architectures": []}, "'architectures'"),
        ("[1]", "should have an object"),
        ("[" * 100_000, "is not JSON"),
        ("{", "is not JSON"),
    ],
)
def test_bad_configurations(config, words, tmp_path, capsys, monkeypatch):
    modules = ("eqx_zoo", "models", "causal_lm", "config")
    names = [".".join(modules[:i]) for i in range(1, 5)]
    for name in names:
        module = types.ModuleType(name)
        vars(module).update(CausalLM=_model, Config=_Config)
        monkeypatch.setitem(sys.modules, name, module)
    interop.save(tmp_path / "model.safetensors", {"w": np.ones(3)})
    text = config if isinstance(config, str) else json.dumps(_config | config)
    folder = tmp_path / "config"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("1 2 3")
    argv = ("evaluate", tmp_path / "model.safetensors", tokens, "--config", folder)
    assert words in _mistake(capsys, *argv)


def test_bad_calls(tmp_path, capsys, monkeypatch):
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("1 2 3")
    argv = ("evaluate", tmp_path, tokens)
    assert "--dense" in _mistake(capsys, *argv, "--layers")
    monkeypatch.setitem(sys.modules, "eqx_zoo", None)
    assert "pip install eqx-zoo" in _mistake(capsys, *argv)


class _Bigrams(eqx.Module):
    """As the models of eqx-zoo are called."""

    logits: jax.Array

    def __call__(self, tokens):
        return self.logits[tokens], None


@pytest.mark.parametrize("dense", (False, True))
def test_several(dense, tmp_path, capsys, monkeypatch):
    loaded = []

    def load(path, config, largest):
        loaded.append(path.name)
        return _Bigrams(jr.normal(jr.key(len(path.name)), (5, 5)))

    monkeypatch.setattr(_evaluate, "load_model", load)
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("1 2 3 4 2 0 1")
    argv = ["evaluate", "a", "bb", "ccc", str(tokens), "--length", "4"]
    assert main(argv + ["--dense", "bb"] * dense) == 0
    assert loaded == ["bb"] * dense + ["a", "bb", "ccc"]
    first, *rows = capsys.readouterr().out.splitlines()
    assert first.split()[:3] == ["model", "loss", "perplexity"]
    names = ["(dense)"] * dense + ["a", "bb", "ccc"]
    assert [row.split()[0] for row in rows[:-1]] == names
    assert "of 5 tokens" in rows[-1]
    if dense:
        assert rows[2].split()[-1] == "100.0%" and "+0.0000" in rows[2]
        assert rows[1].split()[1] != rows[2].split()[1] == rows[0].split()[1]


def test_config_of_gguf(tmp_path):
    family = "Qwen3Moe"
    config = families.config(family)
    metadata = {
        "general.architecture": "qwen3moe",
        "qwen3moe.embedding_length": families.hidden,
        "qwen3moe.feed_forward_length": families.wide,
        "qwen3moe.block_count": families.depth,
        "qwen3moe.attention.head_count": families.heads,
        "qwen3moe.attention.head_count_kv": families.few,
        "qwen3moe.attention.key_length": families.head,
        "qwen3moe.attention.layer_norm_rms_epsilon": 1e-5,
        "qwen3moe.rope.freq_base": 10000.0,
        "qwen3moe.expert_count": families.experts,
        "qwen3moe.expert_used_count": families.chosen,
        "qwen3moe.expert_feed_forward_length": families.narrow,
    }
    arrays = families.arrays(family)
    ends = {
        "token_embd.weight": arrays["model.embed_tokens.weight"],
        "output.weight": arrays["lm_head.weight"],
    }

    def found(arrays, metadata):
        interop.write_gguf(tmp_path / "model.gguf", arrays, metadata)
        with interop.open(tmp_path / "model.gguf") as checkpoint:
            return config_of_gguf(checkpoint)

    of_file = found(ends, metadata)
    for key, x in of_file.items():
        assert x == pytest.approx(config[key]), key
    assert found({"token_embd.weight": ends["token_embd.weight"]}, metadata)[
        "tie_word_embeddings"
    ]
    for more, words in (
        ({"general.architecture": "gemma"}, "one of llama, qwen2"),
        ({"qwen3moe.rope.scaling.type": "yarn"}, "--config"),
        ({"qwen3moe.block_count": "two"}, "numbers for num_hidden_layers"),
    ):
        with pytest.raises(ValueError, match=words):
            found(ends, metadata | more)
    with pytest.raises(ValueError, match="token_embd"):
        found({"output.weight": ends["output.weight"]}, metadata)
