import sys

import numpy as np
import pytest

from eqquant import interop
from eqquant._cli import main
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
    ],
)
def test_bad_tokens(text, words, tmp_path, capsys):
    path = tmp_path / "tokens.txt"
    path.write_text(text)
    assert words in _mistake(capsys, "evaluate", tmp_path / "no.gguf", path)


def test_bad_calls(tmp_path, capsys, monkeypatch):
    tokens = tmp_path / "tokens.txt"
    tokens.write_text("1 2 3")
    argv = ("evaluate", tmp_path, tokens)
    assert "--dense" in _mistake(capsys, *argv, "--layers")
    monkeypatch.setitem(sys.modules, "eqx_zoo", None)
    assert "pip install eqx-zoo" in _mistake(capsys, *argv)


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
