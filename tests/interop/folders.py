"""Small models as folders of Hugging Face, with their configuration and tokenizer."""

import json
import pathlib
import struct
from typing import Any

import numpy as np

from . import files
from .sizes import Sizes


sizes = Sizes(32, 64, 2, 4, 2, 16, 20)
hidden, wide, depth, heads, few, head, vocabulary = sizes

_config = {
    **sizes.config(),
    "max_position_embeddings": 100,
    "hidden_act": "silu",
}
_gemma = {
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": head,
    "sliding_window": 10,
}
_of_kinds = {
    "Gemma": _gemma,
    "Gemma2": _gemma | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30},
    "Gemma3": _gemma,
}
kinds = ("Llama", "Mistral", "Qwen2", "Qwen3", "Gemma", "Gemma2", "Gemma3")


def config(kind: str, **changes: Any) -> dict[str, Any]:
    found = (
        _config | {"architectures": [f"{kind}ForCausalLM"]} | _of_kinds.get(kind, {})
    )
    return {key: x for key, x in (found | changes).items() if x is not ...}


_word = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+"
    r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_added = [
    {"id": 9, "content": "<s>", "special": True},
    {"id": 10, "content": "</s>", "special": True},
    {"id": 11, "content": "<tool>", "special": False},
    {"id": 25, "content": "<image>", "special": True},
]
# Of bytes, as Qwen has it.
of_bytes = {
    "added_tokens": _added,
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {
        "type": "Sequence",
        "pretokenizers": [
            {
                "type": "Split",
                "pattern": {"Regex": _word},
                "behavior": "Isolated",
                "invert": False,
            },
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
        ],
    },
    "post_processor": {"type": "ByteLevel"},
    "model": {
        "type": "BPE",
        "vocab": {"a": 0, "b": 1, "c": 2, "\u0120": 3, "ab": 4, "abc": 5, "\u0120a": 6},
        "merges": ["a b", ["ab", "c"], "\u0120 a"],
    },
}
# Of pieces, as Llama 2 has it.
of_pieces = {
    "added_tokens": [{"id": 0, "content": "<unk>", "special": True}, *_added],
    "normalizer": {
        "type": "Sequence",
        "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"},
            {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        ],
    },
    "pre_tokenizer": None,
    "post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}],
    },
    "model": {
        "type": "BPE",
        "byte_fallback": True,
        "unk_token": "<unk>",
        "vocab": {"<unk>": 0, "<0x0A>": 1, "a": 2, "b": 3, "c": 4, "bc": 5, "abc": 6}
        | {"\u2581": 7, "\u2581\u2581": 8},
        "merges": ["b c", "\u2581 \u2581", "a bc"],
    },
}
settings = {
    "bos_token": "<s>",
    "eos_token": {"content": "</s>"},
    "add_bos_token": True,
    "chat_template": "{{ a }}",
}


def _varint(x):
    low = x & 127
    return bytes([low]) if x < 128 else bytes([low | 128]) + _varint(x >> 7)


def _field(number, x):
    if isinstance(x, int):
        return _varint(number << 3) + _varint(x)
    if isinstance(x, float):
        return _varint(number << 3 | 5) + struct.pack("<f", x)
    return _varint(number << 3 | 2) + _varint(len(x)) + x


def sentencepiece(kind: int = 2, prefix: bool = False) -> bytes:
    """A `tokenizer.model`."""
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0x0A>", 0.0, 6)]
    pieces += [("ab", -1.0, 1), ("\u2581a", -2.5, 1), ("\u2581\u2581", 0.0, 4)]
    found = b"".join(
        _field(1, _field(1, text.encode()) + _field(2, score) + _field(3, type))
        for text, score, type in pieces
    )
    trainer, normalizer = _field(3, kind), _field(1, b"identity") + _field(3, prefix)
    return found + _field(2, trainer) + _field(3, normalizer)


def shapes(kind: str) -> dict[str, tuple[int, ...]]:
    """The shapes of the arrays of a model."""
    found = {"embed_tokens": (vocabulary, hidden), "norm": (hidden,)}
    block = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (heads * head, hidden),
        "self_attn.k_proj": (few * head, hidden),
        "self_attn.v_proj": (few * head, hidden),
        "self_attn.o_proj": (hidden, heads * head),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
    }
    if kind in ("Qwen3", "Gemma3"):
        block |= {"self_attn.q_norm": (head,), "self_attn.k_norm": (head,)}
    if kind in ("Gemma2", "Gemma3"):
        block |= {f"{x}_feedforward_layernorm": (hidden,) for x in ("pre", "post")}
    for i in range(depth):
        found |= {f"layers.{i}.{name}": shape for name, shape in block.items()}
    found = {f"model.{name}.weight": shape for name, shape in found.items()}
    if kind == "Qwen2":
        for i in range(depth):
            for x, n in (("q", heads), ("k", few), ("v", few)):
                found[f"model.layers.{i}.self_attn.{x}_proj.bias"] = (n * head,)
    if not kind.startswith("Gemma"):
        found["lm_head.weight"] = (vocabulary, hidden)
    return found


def arrays(kind: str, dtype: Any = np.float32) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    draw = lambda shape: rng.standard_normal(shape, np.float32).astype(dtype)
    return {name: draw(shape) for name, shape in shapes(kind).items()}


def write(folder: pathlib.Path, kind: str, dtype: Any = np.float32, **changes: Any):
    """Writes a whole folder. Its configuration has these changes; `...` leaves out a
    value."""
    folder.mkdir(exist_ok=True)
    write_json(folder / "config.json", config(kind, **changes))
    tokenizer = of_bytes if kind.startswith("Qwen") else of_pieces
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", settings)
    files.save(folder / "model.safetensors", arrays(kind, dtype))
    return folder


def write_json(path: pathlib.Path, tree: Any) -> None:
    path.write_text(json.dumps(tree))
