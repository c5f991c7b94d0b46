"""Small random models of the families that `eqquant.demo.Llama` is for, as files of
llama.cpp, with a tokenizer of bytes."""

import pathlib
from typing import Any

import numpy as np
from tokenizers import pre_tokenizers

import eqquant as eqq
from eqquant import interop


width, hidden, depth, heads, key_heads, size = 64, 96, 3, 4, 2, 16
merges = ["t h", "th e", "\u0120 a", "\u0120 the", "i n", "e r"]


def tokens() -> list[str]:
    """The tokens: two that control the model, bytes, and what is merged of them."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merged = [pair.replace(" ", "") for pair in merges]
    return ["<s>", "</s>", *letters, *merged]


def arrays(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    """The arrays of a model by their names in llama.cpp, but with the rows of queries
    and keys in the order of Hugging Face: of `"llama"`, `"llama3"`, whose frequencies
    are scaled, `"qwen2"` or `"qwen3"`."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(0, shape[-1] ** -0.5, shape).astype(np.float32)

    def ones(n):
        return random.uniform(0.5, 1.5, n).astype(np.float32)

    found = {"token_embd.weight": normal(len(tokens()), width)}
    found["output_norm.weight"] = ones(width)
    if kind != "qwen3":  # tied
        found["output.weight"] = normal(len(tokens()), width)
    if kind == "llama3":
        found["rope_freqs.weight"] = np.linspace(1, 8, size // 2, dtype=np.float32)
    rows = {"q": heads * size, "k": key_heads * size, "v": key_heads * size}
    for i in range(depth):
        layer = {f"attn_{x}.weight": normal(n, width) for x, n in rows.items()}
        layer["attn_output.weight"] = normal(width, heads * size)
        layer |= {f"ffn_{x}.weight": normal(hidden, width) for x in ("gate", "up")}
        layer["ffn_down.weight"] = normal(width, hidden)
        layer |= {f"{x}_norm.weight": ones(width) for x in ("attn", "ffn")}
        if kind == "qwen2":
            layer |= {f"attn_{x}.bias": normal(n) for x, n in rows.items()}
        if kind == "qwen3":
            layer |= {f"attn_{x}_norm.weight": ones(size) for x in "qk"}
        found |= {f"blk.{i}.{name}": w for name, w in layer.items()}
    return found


def metadata(kind: str) -> dict[str, Any]:
    name = kind.replace("3", "") if kind == "llama3" else kind
    own = {
        "block_count": depth,
        "embedding_length": width,
        "attention.head_count": heads,
        "attention.head_count_kv": key_heads,
        "attention.key_length": size,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "rope.freq_base": 1e3,
    }
    return {
        "general.architecture": name,
        **{f"{name}.{key}": x for key, x in own.items()},
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens(),
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens()) - 2)],
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
    }


def write(
    path: pathlib.Path, kind: str = "llama", format: Any = None, values: Any = None
) -> pathlib.Path:
    """Writes a model to a file of llama.cpp, its matrices in a format or not. The
    projections of values in the second layer may be in another one, as in `Q4_K_M`."""
    found: dict[str, Any] = arrays(kind)
    for name, w in found.items():
        mine = values if values and name == "blk.1.attn_v.weight" else format
        if mine is not None and w.ndim == 2:
            found[name] = eqq.quantize(w, mine, axis=-1)
    interop.write_gguf(path, found, metadata(kind))
    return path
