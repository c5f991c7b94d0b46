import dataclasses
from collections.abc import Mapping
from typing import Any

from .._renaming import inverse_tables
from ._hyperparameters import (
    gemma,
    gemma2,
    gemma3,
    Hyperparameters,
    llama,
    most_layers,
    qwen,
)
from ._values import Values


# Shapes are written as letters for sizes: of the vocabulary (v), of the embedding (e),
# of the hidden layer (f), of all heads of queries (q) and of keys (k), of one head (h),
# and of half a head (r).
_block = {
    "attn_norm.weight": "e",
    "attn_q.weight": "qe",
    "attn_k.weight": "ke",
    "attn_v.weight": "ke",
    "attn_output.weight": "eq",
    "ffn_norm.weight": "e",
    "ffn_gate.weight": "fe",
    "ffn_up.weight": "fe",
    "ffn_down.weight": "ef",
}
_biases = {"attn_q.bias": "q", "attn_k.bias": "k", "attn_v.bias": "k"}
_other_biases = {
    "attn_output.bias": "e",
    "ffn_gate.bias": "f",
    "ffn_up.bias": "f",
    "ffn_down.bias": "e",
}
_head_norms = {"attn_q_norm.weight": "h", "attn_k_norm.weight": "h"}
_post_norms = {"post_attention_norm.weight": "e", "post_ffw_norm.weight": "e"}

_names: dict[str, Any] = dict(inverse_tables["llama"])
_names_of_gemma = _names | {
    "model.layers.*.post_attention_layernorm.*": "blk.*.post_attention_norm.*",
    "model.layers.*.pre_feedforward_layernorm.*": "blk.*.ffn_norm.*",
    "model.layers.*.post_feedforward_layernorm.*": "blk.*.post_ffw_norm.*",
}


@dataclasses.dataclass(frozen=True)
class Family:
    """Models that llama.cpp runs as one architecture.

    - `architecture`: its name in llama.cpp.
    - `hyperparameters`: returns the hyperparameters of a configuration.
    - `block`, `optional`: the required and the optional tensors of each layer, with
      their shapes.
    - `names`: maps patterns of names in Hugging Face to patterns in llama.cpp.
    - `has_head`: whether the output may have its own matrix.
    - `is_tied`: whether the embedding is also the output matrix by default.
    - `has_factors`: whether a tensor may scale its rotary frequencies.
    """

    architecture: str
    hyperparameters: Hyperparameters
    block: Mapping[str, str]
    optional: Mapping[str, str]
    names: Mapping[str, Any]
    has_head: bool = True
    is_tied: bool = False
    has_factors: bool = False

    def shapes(
        self, metadata: Mapping[str, Any]
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
        """Returns the shapes of the required and of the optional tensors, by their
        names. Raises a `ValueError` if a hyperparameter is missing."""
        sizes = self._sizes(metadata)
        head = {"output.weight": "ve"} if self.has_head else {}
        factors = {"rope_freqs.weight": "r"} if self.has_factors else {}
        needed = {"token_embd.weight": "ve", "output_norm.weight": "e"}
        key = f"{self.architecture}.block_count"
        layers = range(self._values(metadata).count(key, most=most_layers))
        needed |= {f"blk.{i}.{k}": x for i in layers for k, x in self.block.items()}
        maybe = head | factors
        maybe |= {f"blk.{i}.{k}": x for i in layers for k, x in self.optional.items()}
        return _shapes(needed, sizes), _shapes(maybe, sizes)

    def _values(self, metadata):
        return Values(dict(metadata), "the metadata")

    def _sizes(self, metadata):
        values = self._values(metadata)

        def count(key, default=None):
            return values.count(f"{self.architecture}.{key}", default)

        heads, e = count("attention.head_count"), count("embedding_length")
        h = count("attention.key_length", max(1, e // heads))
        tokens = metadata.get("tokenizer.ggml.tokens")
        is_list = isinstance(tokens, list)
        return {
            "v": len(tokens) if is_list else count("vocab_size"),
            "e": e,
            "f": count("feed_forward_length"),
            "h": h,
            "q": h * heads,
            "k": h * count("attention.head_count_kv", heads),
            "r": h // 2,
        }


def _shapes(tensors, sizes):
    return {name: tuple(sizes[x] for x in text) for name, text in tensors.items()}


_llama = Family(
    "llama", llama, _block, _biases | _other_biases, _names, has_factors=True
)
_gemma = Family("gemma", gemma, _block, {}, _names, has_head=False, is_tied=True)
# The families by the architecture in the configuration.
families: dict[str, Family] = {
    "LlamaForCausalLM": _llama,
    "MistralForCausalLM": _llama,
    "Qwen2ForCausalLM": Family("qwen2", qwen, _block, _biases, _names),
    "Qwen3ForCausalLM": Family("qwen3", qwen, _block | _head_norms, _biases, _names),
    "GemmaForCausalLM": _gemma,
    "Gemma2ForCausalLM": dataclasses.replace(
        _gemma,
        architecture="gemma2",
        hyperparameters=gemma2,
        block=_block | _post_norms,
        names=_names_of_gemma,
    ),
    "Gemma3ForCausalLM": dataclasses.replace(
        _gemma,
        architecture="gemma3",
        hyperparameters=gemma3,
        block=_block | _post_norms | _head_norms,
        names=_names_of_gemma,
        has_head=True,
    ),
}
# The families by the architecture in a GGUF file.
architectures: dict[str, Family] = {x.architecture: x for x in families.values()}
