import math

import ml_dtypes
import numpy as np
import pytest

from eqquant import interop

from . import folders
from .llama_files import fields_of, llama3, tensors_of, written
from .llama_names import matrices


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
    path = written(folders.write(tmp_path / "my model", kind))
    found = fields_of(path)
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
    path = written(folder)
    checkpoint, found = interop.open(path), tensors_of(path)
    assert len(checkpoint) == len(given)
    is_gemma = kind.startswith("Gemma")
    for i in range(folders.depth):
        for theirs, ours in matrices.items():
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
                w = w.astype(np.float32)
                type, x = found[f"blk.{i}.{ours}.weight"]
                assert type == "F32"
                np.testing.assert_array_equal(x, w + np.float32(is_gemma))
                x = checkpoint[f"blk.{i}.{ours}.weight"]
                np.testing.assert_allclose(x, w, rtol=0, atol=1.2e-7)
    embedding = given.pop("model.embed_tokens.weight")
    np.testing.assert_array_equal(checkpoint["token_embd.weight"], embedding)
    norm = given.pop("model.norm.weight").astype(np.float32)
    _, x = found["output_norm.weight"]
    np.testing.assert_array_equal(x, norm + np.float32(is_gemma))
    np.testing.assert_allclose(checkpoint["output_norm.weight"], norm, 0, 1.2e-7)
    if not is_gemma:
        head = given.pop("lm_head.weight")
        np.testing.assert_array_equal(checkpoint["output.weight"], head)
    assert not given


# (`interop.open` puts the rows back into their order.)
@pytest.mark.parametrize("kind", ["Llama", "Mistral", "Qwen2", "Gemma"])
def test_rows_of_queries(kind, tmp_path):
    found = tensors_of(written(folders.write(tmp_path / "a", kind)))
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
    kind, bias = tensors_of(path)["blk.0.attn_k.bias"]
    assert kind == "F32" and bias[:4].tolist() == [0, 8, 1, 9]
    assert tensors_of(path)["blk.0.attn_v.bias"][1][:4].tolist() == [0, 1, 2, 3]


# As of transformers 4, and of 5.
@pytest.mark.parametrize("is_old", [True, False])
def test_rotary_frequencies(is_old, tmp_path):
    def with_rope(kind, rope, theta=5e5):
        old = {"rope_scaling": rope, "rope_theta": theta}
        new = {"rope_parameters": {**rope, "rope_theta": theta}}
        folder = folders.write(tmp_path / "a", kind, **(old if is_old else new))
        return written(folder)

    path = with_rope("Llama", llama3)
    kind, factors = tensors_of(path)["rope_freqs.weight"]
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
    assert fields_of(path)["llama.rope.freq_base"] == 5e5

    linear = {"type" if is_old else "rope_type": "linear", "factor": 4}
    found = fields_of(with_rope("Qwen3", linear))
    assert found["qwen3.rope.scaling.type"] == "linear"
    assert found["qwen3.rope.scaling.factor"] == 4

    yarn = {"rope_type": "yarn", "factor": math.exp(10), "attention_factor": 3.0}
    found = fields_of(with_rope("Qwen2", yarn))
    assert found["qwen2.rope.scaling.type"] == "yarn"
    assert found["qwen2.rope.scaling.original_context_length"] == 100
    assert found["qwen2.rope.scaling.attn_factor"] == 1.5
    assert found["qwen2.rope.scaling.yarn_beta_fast"] == 32


def test_windows(tmp_path):
    fields = lambda kind, **changes: fields_of(
        written(folders.write(tmp_path / "a", kind, **changes))
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
