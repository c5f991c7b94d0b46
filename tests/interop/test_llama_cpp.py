import copy
import filecmp
import math
import random
import subprocess
import sys

import jax.numpy as jnp
import jax.random as jr
import ml_dtypes
import numpy as np
import pytest

import eqquant as eqq
from eqquant import interop

from . import folders, llama
from .fuzz import mutated


def _written(folder, **options):
    path = folder.with_suffix(".gguf")
    with interop.open(folder) as checkpoint:
        interop.write_gguf(path, checkpoint, **{"config": folder} | options)
    return path


def _fields(path):
    import gguf

    reader = gguf.GGUFReader(path)
    fields = {key: field.contents() for key, field in reader.fields.items()}
    return {k: x for k, x in fields.items() if not k.startswith("GGUF.")}


def _tensors(path):
    import gguf

    return {
        tensor.name: (tensor.tensor_type.name, np.array(tensor.data))
        for tensor in gguf.GGUFReader(path).tensors
    }


_common = {
    "block_count": 2,
    "context_length": 100,
    "embedding_length": 32,
    "feed_forward_length": 64,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": np.float32(1e-5),
    "attention.key_length": 16,
    "attention.value_length": 16,
    "rope.dimension_count": 16,
    "rope.freq_base": 1e4,
    "vocab_size": 20,
}
_own = {
    "Gemma2": {
        "attn_logit_softcapping": 50,
        "final_logit_softcapping": 30,
        "attention.sliding_window": 10,
    },
    "Gemma3": {
        "rope.freq_base": 1e6,
        "rope.freq_base_swa": 1e4,
        "attention.sliding_window": 10,
    },
}


@pytest.mark.parametrize("kind", folders.kinds)
def test_hyperparameters(kind, tmp_path):
    path = _written(folders.write(tmp_path / "my model", kind))
    found = _fields(path)
    name = {"Mistral": "llama"}.get(kind, kind.lower())
    own = {
        key.removeprefix(f"{name}."): x
        for key, x in found.items()
        if key.startswith(f"{name}.")
    }
    assert own == _common | _own.get(kind, {})
    general = {k: x for k, x in found.items() if k.startswith("general.")}
    assert general == {
        "general.architecture": name,
        "general.name": "my model",
        "general.file_type": 0,
    }


@pytest.mark.parametrize("kind", folders.kinds)
def test_arrays(kind, tmp_path):
    folder = folders.write(tmp_path / "a", kind, ml_dtypes.bfloat16)
    given = folders.arrays(kind, ml_dtypes.bfloat16)
    checkpoint = interop.open(_written(folder))
    assert len(checkpoint) == len(given)
    is_gemma = kind.startswith("Gemma")
    for i in range(folders.depth):
        for theirs, ours in {
            "self_attn.q_proj": "attn_q",
            "self_attn.k_proj": "attn_k",
            "self_attn.v_proj": "attn_v",
            "self_attn.o_proj": "attn_output",
            "mlp.gate_proj": "ffn_gate",
            "mlp.up_proj": "ffn_up",
            "mlp.down_proj": "ffn_down",
        }.items():
            x = checkpoint[f"blk.{i}.{ours}.weight"]
            w = given.pop(f"model.layers.{i}.{theirs}.weight")
            np.testing.assert_array_equal(x, w, strict=True)
            if (w := given.pop(f"model.layers.{i}.{theirs}.bias", None)) is not None:
                bias = checkpoint[f"blk.{i}.{ours}.bias"]
                np.testing.assert_array_equal(bias, w.astype(np.float32), strict=True)
        after = (
            "ffn_norm" if kind not in ("Gemma2", "Gemma3") else "post_attention_norm"
        )
        for theirs, ours in {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": after,
            "pre_feedforward_layernorm": "ffn_norm",
            "post_feedforward_layernorm": "post_ffw_norm",
            "self_attn.q_norm": "attn_q_norm",
            "self_attn.k_norm": "attn_k_norm",
        }.items():
            w = given.pop(f"model.layers.{i}.{theirs}.weight", None)
            if w is not None:
                w = w.astype(np.float32) + np.float32(is_gemma)
                x = checkpoint[f"blk.{i}.{ours}.weight"]
                np.testing.assert_array_equal(x, w, strict=True)
    embedding = given.pop("model.embed_tokens.weight")
    np.testing.assert_array_equal(checkpoint["token_embd.weight"], embedding)
    norm = given.pop("model.norm.weight").astype(np.float32) + np.float32(is_gemma)
    np.testing.assert_array_equal(checkpoint["output_norm.weight"], norm)
    if not is_gemma:
        head = given.pop("lm_head.weight")
        np.testing.assert_array_equal(checkpoint["output.weight"], head)
    assert not given


# (`interop.open` puts the rows back into their order.)
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Gemma"])
def test_rows_of_queries(kind, tmp_path):
    found = _tensors(_written(folders.write(tmp_path / "a", kind)))
    given = folders.arrays(kind)
    for x, n in (("q", folders.heads), ("k", folders.few)):
        _, w = found[f"blk.1.attn_{x}.weight"]
        expected = given[f"model.layers.1.self_attn.{x}_proj.weight"]
        if kind in ("Llama", "Mistral"):
            # Of each head, row i of the first half, and then row i of the second.
            order = [
                h * folders.head + half * folders.head // 2 + i
                for h in range(n)
                for i in range(folders.head // 2)
                for half in range(2)
            ]
            expected = expected[order]
        np.testing.assert_array_equal(w, expected)


def test_biases_are_permuted_with_their_rows(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    more = {
        f"model.layers.{i}.self_attn.{x}_proj.bias": np.arange(n * folders.head) / 1.0
        for i in range(folders.depth)
        for x, n in (("q", folders.heads), ("k", folders.few), ("v", folders.few))
    }
    path = tmp_path / "a.gguf"
    interop.write_gguf(path, folders.arrays("Llama") | more, config=folder)
    kind, bias = _tensors(path)["blk.0.attn_k.bias"]
    assert kind == "F32" and bias[:4].tolist() == [0, 8, 1, 9]
    assert _tensors(path)["blk.0.attn_v.bias"][1][:4].tolist() == [0, 1, 2, 3]


_llama3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


# As of transformers 4, and of 5.
@pytest.mark.parametrize("is_old", [True, False])
def test_rotary_frequencies(is_old, tmp_path):
    def written(kind, rope, theta=5e5):
        old = {"rope_scaling": rope, "rope_theta": theta}
        new = {"rope_parameters": {**rope, "rope_theta": theta}}
        folder = folders.write(tmp_path / "a", kind, **(old if is_old else new))
        return _written(folder)

    path = written("Llama", _llama3)
    kind, factors = _tensors(path)["rope_freqs.weight"]
    assert kind == "F32" and factors.shape == (folders.head // 2,)
    for i, factor in enumerate(factors):
        wave = 2 * math.pi * 5e5 ** (2 * i / folders.head)
        if wave < 64 / 4:
            assert factor == 1
        elif wave > 64:
            assert factor == 8
        else:
            share = (64 / wave - 1) / 3
            np.testing.assert_allclose(1 / factor, (1 - share) / 8 + share, 1e-6)
    assert _fields(path)["llama.rope.freq_base"] == 5e5

    linear = {"type" if is_old else "rope_type": "linear", "factor": 4}
    found = _fields(written("Qwen3", linear))
    assert found["qwen3.rope.scaling.type"] == "linear"
    assert found["qwen3.rope.scaling.factor"] == 4

    yarn = {"rope_type": "yarn", "factor": math.exp(10), "attention_factor": 3.0}
    found = _fields(written("Qwen2", yarn))
    assert found["qwen2.rope.scaling.type"] == "yarn"
    assert found["qwen2.rope.scaling.original_context_length"] == 100
    assert found["qwen2.rope.scaling.attn_factor"] == 1.5
    assert found["qwen2.rope.scaling.yarn_beta_fast"] == 32


def test_windows(tmp_path):
    fields = lambda kind, **changes: _fields(
        _written(folders.write(tmp_path / "a", kind, **changes))
    )
    assert fields("Mistral", sliding_window=50)["llama.context_length"] == 50
    assert fields("Mistral", sliding_window=None)["llama.context_length"] == 100
    qwen = {"sliding_window": 50, "use_sliding_window": False}
    assert fields("Qwen2", **qwen)["qwen2.context_length"] == 100
    qwen["use_sliding_window"] = True
    assert fields("Qwen2", **qwen)["qwen2.context_length"] == 50
    kinds = ["full_attention", "sliding_attention"]
    found = fields("Gemma3", layer_types=kinds)
    assert found["gemma3.attention.sliding_window_pattern"] == [False, True]
    assert "gemma3.attention.sliding_window" not in fields(
        "Gemma3", sliding_window=None
    )
    rope = {"full_attention": {"rope_theta": 3e5}, "sliding_attention": {}}
    found = fields("Gemma3", rope_parameters=rope)
    assert found["gemma3.rope.freq_base"] == 3e5
    assert found["gemma3.rope.freq_base_swa"] == 1e4
    found = fields("Gemma3", rope_local_base_freq=7e4)
    assert found["gemma3.rope.freq_base_swa"] == 7e4


def test_tokenizer_of_bytes(tmp_path):
    found = _fields(_written(folders.write(tmp_path / "a", "Qwen2")))
    tokens = ["a", "b", "c", "\u0120", "ab", "abc", "\u0120a", "[PAD7]", "[PAD8]"]
    tokens += ["<s>", "</s>", "<tool>", *(f"[PAD{i}]" for i in range(12, 20))]
    assert {k: x for k, x in found.items() if k.startswith("tokenizer.")} == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 7 + [5, 5, 3, 3, 4] + [5] * 8,
        "tokenizer.ggml.merges": ["a b", "ab c", "\u0120 a"],
        "tokenizer.ggml.bos_token_id": 9,
        "tokenizer.ggml.eos_token_id": 10,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": "{{ a }}",
    }


def test_tokenizer_of_pieces(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", bos_token_id=2)
    found = _fields(_written(folder))
    assert found["tokenizer.ggml.model"] == "llama"
    assert found["tokenizer.ggml.tokens"][:12] == [
        *("<unk>", "<0x0A>", "a", "b", "c", "bc", "abc", "\u2581", "\u2581\u2581"),
        *("<s>", "</s>", "<tool>"),
    ]
    types = [2, 6, *[1] * 7, 3, 3, 4, *[5] * 8]
    assert found["tokenizer.ggml.token_type"] == types
    scores = found["tokenizer.ggml.scores"]
    # Pairs that come first have the largest scores.
    assert scores[5] == 0 > scores[8] > scores[6] > scores[2]
    flags = {k: x for k, x in found.items() if k.startswith("tokenizer.ggml.add")}
    assert flags == {
        "tokenizer.ggml.add_space_prefix": True,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
    }
    assert found["tokenizer.ggml.unknown_token_id"] == 0
    assert found["tokenizer.ggml.bos_token_id"] == 9

    # The scores of its own model are better.
    (folder / "tokenizer.model").write_bytes(folders.sentencepiece())
    tree = copy.deepcopy(folders.of_pieces) | {"added_tokens": []}
    tree["normalizer"] = tree["normalizer"]["normalizers"][1]
    tree["post_processor"] = None
    folders.write_json(folder / "tokenizer.json", tree)
    found = _fields(_written(folder))
    assert found["tokenizer.ggml.scores"][4:6] == [-1, -2.5]
    assert not found["tokenizer.ggml.add_space_prefix"]


def test_tokenizer_model_alone(tmp_path):
    folder = folders.write(tmp_path / "a", "Gemma", eos_token_id=[2, 1])
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(folders.sentencepiece(prefix=True))
    own = {"11": {"content": "<tool>", "special": False}}
    own |= {"1": {"content": "<s>", "special": True}, "x": {}}
    folders.write_json(folder / "tokenizer_config.json", {"added_tokens_decoder": own})
    (folder / "chat_template.jinja").write_text("{{ b }}")
    found = _fields(_written(folder))
    tokens = ["<unk>", "<s>", "</s>", "<0x0A>", "ab", "\u2581a", "  ", "[PAD7]"]
    assert found["tokenizer.ggml.tokens"][:8] == tokens
    assert found["tokenizer.ggml.tokens"][11] == "<tool>"
    types = [2, 3, 3, 6, 1, 1, 4, 5, 5, 5, 5, 4]
    assert found["tokenizer.ggml.token_type"][:12] == types
    assert found["tokenizer.ggml.scores"][4:6] == [-1, -2.5]
    assert found["tokenizer.ggml.add_space_prefix"]
    assert found["tokenizer.ggml.eos_token_id"] == 2
    assert found["tokenizer.chat_template"] == "{{ b }}"


def test_templates(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    templates = [{"name": "tools", "template": "a"}, {"name": "default"}]
    templates[1]["template"] = "b"
    # The first token is known from the template alone.
    folders.write_json(folder / "tokenizer_config.json", {"chat_template": templates})
    found = _fields(_written(folder))
    assert found["tokenizer.chat_template"] == "b"
    assert found["tokenizer.ggml.bos_token_id"] == 9
    assert "tokenizer.ggml.eos_token_id" not in found
    for wrong in ([{"name": []}, 3], 4, {}):
        folders.write_json(folder / "tokenizer_config.json", {"chat_template": wrong})
        with pytest.raises(ValueError, match="(objects|text) for 'chat_template'"):
            _written(folder)
    folders.write_json(folder / "tokenizer_config.json", {})
    folders.write_json(folder / "chat_template.json", {"chat_template": "c"})
    assert _fields(_written(folder))["tokenizer.chat_template"] == "c"


def test_tokenizer_model_that_is_cut_short():
    from eqquant.interop._llama_cpp._sentencepiece import read_sentencepiece

    data = folders.sentencepiece()
    assert len(read_sentencepiece(data, "a").tokens) == 7
    # (What comes last need not be there.)
    for size in range(len(data) - 14):
        with pytest.raises(ValueError, match="a is no model|Got model type 1"):
            read_sentencepiece(data[:size], "a")


def test_pieces_that_are_merged_in_another_way(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    tree = copy.deepcopy(folders.of_pieces)
    tree["model"]["merges"] = tree["model"]["merges"][:2]
    folders.write_json(folder / "tokenizer.json", tree)
    with pytest.warns(UserWarning, match="not made from a model of SentencePiece"):
        _written(folder)


_words = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_rest = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_llama_3 = rf"{_words}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_rest}"


def _split(pattern):
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated"}


def _byte_level(use_regex):
    own = {"add_prefix_space": False, "use_regex": use_regex}
    return {"type": "ByteLevel", **own}


@pytest.mark.parametrize(
    "steps, ignores, name",
    [
        ([_split(_llama_3), _byte_level(False)], True, "llama-bpe"),
        ([_split(_llama_3), _byte_level(False)], False, "dbrx"),
        ([_byte_level(True)], False, "gpt-2"),
        (
            [{"type": "Digits", "individual_digits": True}, _byte_level(True)],
            False,
            "smollm",
        ),
        ([_split("other"), _byte_level(False)], False, None),
        ([{"type": "Whitespace"}], False, None),
        ([], False, None),
    ],
)
def test_how_text_is_split(steps, ignores, name, tmp_path):
    folder = folders.write(tmp_path / "a", "Qwen2")
    tree = copy.deepcopy(folders.of_bytes)
    tree["model"]["ignore_merges"] = ignores
    tree["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    if len(steps) == 1:
        (tree["pre_tokenizer"],) = steps
    folders.write_json(folder / "tokenizer.json", tree)
    if name is None:
        with pytest.raises(ValueError, match="none of llama-bpe, dbrx, qwen2"):
            _written(folder)
        path = _written(folder, metadata={"tokenizer.ggml.pre": "falcon"})
        assert _fields(path)["tokenizer.ggml.pre"] == "falcon"
    else:
        assert _fields(_written(folder))["tokenizer.ggml.pre"] == name


def test_another_output_than_the_embedding(tmp_path):
    # A tied one is left out, even if a file has it.
    path = _written(folders.write(tmp_path / "a", "Llama", tie_word_embeddings=True))
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
    fields = _fields(path)
    assert fields["general.file_type"] == 14
    assert fields["general.quantization_version"] == 2
    types = {name: kind for name, (kind, _) in _tensors(path).items()}
    assert types["token_embd.weight"] == types["blk.0.attn_norm.weight"] == "F32"
    assert types["blk.0.ffn_down.weight"] == "Q4_K"
    checkpoint = interop.open(path)
    again = interop.load_into(model, checkpoint, rename=["llama", ("model.*", "*")])
    tokens = jnp.arange(7)
    np.testing.assert_array_equal(again(tokens), quantized(tokens))


def test_from_another_file(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", rope_scaling=_llama3)
    path = _written(folder)
    again = tmp_path / "b.gguf"
    with interop.open(path) as checkpoint:
        interop.write_gguf(again, checkpoint, config=checkpoint)
    assert filecmp.cmp(path, again, shallow=False)
    # And of arrays by other names, without the frequencies.
    interop.write_gguf(again, interop.open(folder), config=path)
    assert _fields(again) == _fields(path)
    names = [x for x in interop.open(path)]
    other = interop.open(again)
    assert set(names) == set(other)
    for name in names:
        np.testing.assert_array_equal(interop.open(path)[name], other[name])
    # Norms have one added once.
    path = _written(folders.write(tmp_path / "c", "Gemma2"))
    interop.write_gguf(again, interop.open(path), config=path)
    assert filecmp.cmp(path, again, shallow=False)


def test_an_architecture_that_is_only_known_to_llama_cpp(tmp_path):
    path, again = tmp_path / "a.gguf", tmp_path / "b.gguf"
    metadata = {"general.architecture": "other", "general.file_type": 7, "other.a": 1}
    interop.write_gguf(path, {"x": jnp.ones((2, 2), jnp.float16)}, metadata)
    interop.write_gguf(again, {"y": jnp.ones((2, 2), jnp.float16)}, config=path)
    assert _fields(again) == metadata | {"general.file_type": 1}


def test_convert(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", rope_scaling=_llama3)
    path, other = _written(folder), tmp_path / "b.gguf"
    outcomes = interop.convert(folder, other, None)
    assert [x.name for x in outcomes] == list(folders.shapes("Llama"))
    assert _fields(path) == _fields(other)
    ours, theirs = interop.open(path), interop.open(other)
    assert set(ours) == set(theirs)
    for name, x in ours.items():
        np.testing.assert_array_equal(x, theirs[name], strict=True)

    third = tmp_path / "c.gguf"
    rules = [("lm_head.*", "q5_1"), ("*.mlp.*", None)]
    interop.convert(folder, third, "q8_0", rules=rules, min_size=0)
    types = {name: kind for name, (kind, _) in _tensors(third).items()}
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
    path = _written(folders.write(tmp_path / "a", "Qwen2"))
    again = tmp_path / "b.gguf"
    interop.convert(path, again, "q4_0", embeddings=True, min_size=0)
    before, after = _fields(path), _fields(again)
    types = {"general.file_type": 2, "general.quantization_version": 2}
    assert after == before | types
    split = tmp_path / "split"
    interop.convert(path.with_suffix(""), split, None, to="gguf", shard_size=9000)
    assert len(list(split.glob("*.gguf"))) > 1
    assert set(interop.open(split)) == set(interop.open(path))


def test_command(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")

    def run(*args):
        command = [sys.executable, "-m", "eqquant", "quantize", *map(str, args)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stderr

    path = tmp_path / "b.gguf"
    options = ("--format", "q8_0", "--min-size", "0")
    assert run(folder, path, *options) == (0, "")
    assert _fields(path)["general.file_type"] == 7
    bare = tmp_path / "c.gguf"
    assert run(folder, bare, *options, "--bare") == (0, "")
    assert _fields(bare) == {}
    again = tmp_path / "d.gguf"
    assert run(folder / "model.safetensors", again, "--config", path, *options)[0] == 0
    assert _fields(again) == _fields(path)
    (folder / "tokenizer.json").unlink()
    code, error = run(folder, tmp_path / "e.gguf")
    assert code == 2 and "should have a 'tokenizer.json' or a 'tokenizer.mod" in error
    assert "--bare" in error and not (tmp_path / "e.gguf").exists()


def test_metadata_overrides(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    (folder / "tokenizer.json").unlink()
    own = {"tokenizer.ggml.model": "none", "general.name": "b", "general.file_type": 7}
    found = _fields(_written(folder, metadata=own))
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


_of_configs = [
    ({"architectures": ["GPT2LMHeadModel"]}, "one of LlamaForCausalLM, .*Got .*GPT2"),
    ({"architectures": ...}, "'architectures'. It has none"),
    ({"hidden_size": ...}, "positive integer for 'hidden_size'. It has none"),
    ({"num_hidden_layers": -1}, "positive integer for 'num_hidden_layers'. Got -1"),
    ({"num_hidden_layers": 10**9}, "a number up to 512 for 'num_hidden_layers'"),
    ({"hidden_size": 2**40}, "a number up to"),
    ({"num_attention_heads": "4"}, "for 'num_attention_heads'. Got '4'"),
    ({"rms_norm_eps": ...}, "positive number for 'rms_norm_eps'. It has none"),
    ({"max_position_embeddings": True}, "'max_position_embeddings'. Got True"),
    ({"vocab_size": ...}, "'vocab_size'. It has none"),
    ({"vocab_size": 2**22}, "a number up to"),
    ({"vocab_size": 21}, r"'model.embed_tokens.weight' should have the shape \(21, 32"),
    (
        {"num_hidden_layers": 3},
        "should be 'model.layers.2.input_layernorm.weight' .'blk",
    ),
    ({"num_hidden_layers": 1}, "'model.layers.1.* has no place in the architecture"),
    ({"num_key_value_heads": 4}, r"k_proj.weight' should have the shape \(64, 32\)"),
    ({"hidden_act": "gelu"}, "'silu', as llama.cpp, for 'hidden_act'. Got 'gelu'"),
    ({"head_dim": 7}, "an even number for 'head_dim'"),
    ({"rope_scaling": {"type": "dynamic"}}, "one of default, linear.* Got 'dynamic'"),
    ({"rope_scaling": {"rope_type": "linear"}}, "'factor'. It has none"),
    ({"rope_scaling": _llama3 | {"high_freq_factor": 1}}, "a number above 1.0"),
    ({"rope_scaling": []}, "an object for 'rope_scaling'"),
    ({"partial_rotary_factor": 0.5}, "rotates whole heads"),
    ({"tie_word_embeddings": 1}, "true or false for 'tie_word_embeddings'"),
]


@pytest.mark.parametrize("changes, match", _of_configs)
def test_configurations_that_are_refused(changes, match, tmp_path):
    folder = folders.write(tmp_path / "a", "Llama", **changes)
    with pytest.raises(ValueError, match=match):
        _written(folder)
    assert not (tmp_path / "a.gguf").exists()


@pytest.mark.parametrize(
    "kind, changes, match",
    [
        ("Gemma2", {"query_pre_attn_scalar": 100}, "16, as llama.cpp computes it"),
        ("Gemma2", {"final_logit_softcapping": None}, "'final_logit_softcapping'"),
        ("Gemma2", {"sliding_window": ...}, "'sliding_window'. It has none"),
        ("Gemma3", {"attn_logit_softcapping": 3.0}, "null, as llama.cpp"),
        ("Gemma3", {"layer_types": ["full_attention"]}, "for each layer"),
        ("Gemma3", {"use_bidirectional_attention": True}, "false, as llama.cpp"),
        ("Gemma", {"tie_word_embeddings": False}, "true, as llama.cpp"),
        ("Qwen2", {"rope_scaling": _llama3}, "no llama3, which llama.cpp lacks"),
        (
            "Qwen3",
            {"rope_scaling": {"type": "yarn", "factor": 2, "mscale": 1}},
            "mscale",
        ),
    ],
)
def test_what_llama_cpp_lacks(kind, changes, match, tmp_path):
    folder = folders.write(tmp_path / "a", kind, **changes)
    with pytest.raises(ValueError, match=match):
        _written(folder)


def _at(tree, path, value):
    *path, last = path
    tree = copy.deepcopy(tree)
    node = tree
    for key in path:
        node = node[key]
    node[last] = value
    return tree


_template = {"type": "TemplateProcessing"}


@pytest.mark.parametrize(
    "path, value, match",
    [
        (("model", "type"), "Unigram", "'BPE', as these"),
        (("model", "vocab"), ["a"], "tokens and their numbers"),
        (("model", "vocab", "a"), -1, "token 'a' should have a number. Got -1"),
        (("model", "vocab", "a"), "0", "token 'a' should have a number"),
        (("model", "vocab"), {}, None),
        (("model", "vocab", "\ud800"), 8, "'.ud800' should be text"),
        (("model", "vocab", "[PAD15]"), 8, "named .PAD...., as unused ones"),
        (("model", "merges"), [], "pairs for 'merges'. It has none"),
        (("model", "merges"), ["a"], "pairs of text without spaces"),
        (("model", "merges"), [["a", "b c"]], "pairs of text without spaces"),
        (("model", "merges"), [["a", 1]], "pairs of text without spaces"),
        (("model", "end_of_word_suffix"), "</w>", "nothing, as llama.cpp"),
        (("normalizer",), {"type": "Lowercase"}, "none, or NFC"),
        (("added_tokens",), [{"id": 3}], "text for 'content'"),
        (("added_tokens",), [{"id": "3", "content": "a"}], "a number for 'id'"),
        (("added_tokens",), [{"id": 3, "content": "a"}], "the token 'a' twice"),
        (("added_tokens",), [4], "objects for 'added_tokens'"),
        (("post_processor",), _template, "one sequence for 'single'"),
        (
            ("post_processor",),
            _template
            | {
                "single": [
                    {"SpecialToken": {"id": "<tool>"}},
                    {"Sequence": {"id": "A"}},
                ]
            },
            "the bos token, as llama.cpp",
        ),
    ],
)
def test_tokenizers_that_are_refused(path, value, match, tmp_path):
    folder = folders.write(tmp_path / "a", "Qwen2")
    tree = _at(folders.of_bytes, path, value)
    folders.write_json(folder / "tokenizer.json", tree)
    if match is None:
        _written(folder)
        return
    with pytest.raises(ValueError, match=match):
        _written(folder)


def test_files_that_are_missing_or_damaged(tmp_path):
    folder = folders.write(tmp_path / "a", "Llama")
    arrays = folders.arrays("Llama")
    path = tmp_path / "a.gguf"
    (folder / "tokenizer.model").write_bytes(folders.sentencepiece(kind=1))
    with pytest.raises(ValueError, match="merges pairs .BPE."):
        interop.write_gguf(path, arrays, config=folder)
    (folder / "tokenizer.model").unlink()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[:-1])
        with pytest.raises(ValueError, match=f"{name}' is not JSON"):
            interop.write_gguf(path, arrays, config=folder)
        (folder / name).write_bytes(data)
    (folder / "config.json").unlink()
    with pytest.raises(ValueError, match="a' should have a 'config.json'"):
        interop.write_gguf(path, arrays, config=folder)
    with pytest.raises(ValueError, match="a folder with a 'config.json', or a GGUF"):
        interop.write_gguf(path, arrays, config=folder / "model.safetensors")
    interop.write_gguf(path, {})
    with pytest.raises(ValueError, match="have the metadata 'general.architecture'"):
        interop.write_gguf(path, arrays, config=path)
    with pytest.raises(FileNotFoundError):
        interop.write_gguf(path, arrays, config=tmp_path / "nothing.gguf")


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma3"])
def test_folders_that_were_changed(kind, tmp_path):
    rng = random.Random(kind)
    folder = folders.write(tmp_path / "a", kind)
    if kind == "Gemma3":
        (folder / "tokenizer.model").write_bytes(folders.sentencepiece())
    arrays, path = folders.arrays(kind), tmp_path / "a.gguf"
    names = (
        "config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "tokenizer.model",
    )
    files = [folder / name for name in names if (folder / name).exists()]
    written = 0
    for _ in range(250):
        target = rng.choice(files)
        data = target.read_bytes()
        target.write_bytes(mutated(rng, target, data))
        try:
            interop.write_gguf(path, arrays, config=folder)
            written += 1
            interop.open(path).close()
        except (ValueError, UserWarning):
            pass
        target.write_bytes(data)
    assert 0 < written < 250
