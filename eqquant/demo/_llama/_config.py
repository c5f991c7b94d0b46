import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from ...interop import Checkpoint


@dataclasses.dataclass(frozen=True)
class Config:
    """The hyperparameters of an [`eqquant.demo.Llama`][].

    - `vocabulary`, `width`, `hidden`, `depth`: the number of tokens, the width of an
      embedding, the width inside an MLP, and the number of layers.
    - `heads`, `key_heads`, `head_size`: the number of heads of queries, the number of
      heads of keys and values, and the size of each head.
    - `eps`: the epsilon of the norms.
    - `theta`: the base of the frequencies of rotary embeddings.
    - `factors`: the divisors of these frequencies, if they are scaled.
    - `is_tied`: whether the embedding is also the output matrix.
    - `has_biases`: whether queries, keys and values have biases, as in Qwen 2.
    - `has_head_norms`: whether heads of queries and keys are normalized, as in Qwen 3.
    """

    vocabulary: int
    width: int
    hidden: int
    depth: int
    heads: int
    key_heads: int
    head_size: int
    eps: float = 1e-5
    theta: float = 1e4
    factors: tuple[float, ...] | None = None
    is_tied: bool = False
    has_biases: bool = False
    has_head_norms: bool = False

    @property
    def frequencies(self) -> Float[np.ndarray, " r"]:
        """The angles by which each position rotates the pairs of numbers of a head
        further."""
        found = self.theta ** -(np.arange(0, self.head_size, 2) / self.head_size)
        return (found / np.asarray(self.factors or 1.0)).astype(np.float32)

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Config":
        """Reads the configuration of a model from the metadata of a GGUF file, or from
        the `config.json` next to other files.

        **Raises:**

        A `ValueError` if the architecture or the scaling of the rotary frequencies is
        not supported, or if a value is missing.
        """
        read, names = (_of_folder, _of_hugging_face)
        if "token_embd.weight" in checkpoint:
            read, names = (_of_gguf, _of_llama_cpp)
        shapes = {}
        for key in ("embedding", "gate"):
            if names[key] not in checkpoint:
                raise ValueError(f"{checkpoint} should have an array {names[key]!r}.")
            shapes[key] = checkpoint.entries[names[key]].shape
        (vocabulary, width), (hidden, _) = shapes.values()
        has = {key: names[key] in checkpoint for key in ("head", "bias", "norm")}
        values = read(checkpoint)
        heads = _count(values, "heads")
        size = _count(values, "head_size", max(1, width // heads))
        theta = _number(values, "theta", 1e4)
        return Config(
            vocabulary,
            width,
            hidden,
            _count(values, "depth"),
            heads,
            _count(values, "key_heads", heads),
            size,
            _number(values, "eps"),
            theta,
            values["factors"](theta ** -(np.arange(0, size, 2) / size)),
            is_tied=not has["head"] or values.get("is_tied") is True,
            has_biases=has["bias"],
            has_head_norms=has["norm"],
        )


_of_llama_cpp = {
    "embedding": "token_embd.weight",
    "gate": "blk.0.ffn_gate.weight",
    "head": "output.weight",
    "bias": "blk.0.attn_q.bias",
    "norm": "blk.0.attn_q_norm.weight",
}
_of_hugging_face = {
    "embedding": "model.embed_tokens.weight",
    "gate": "model.layers.0.mlp.gate_proj.weight",
    "head": "lm_head.weight",
    "bias": "model.layers.0.self_attn.q_proj.bias",
    "norm": "model.layers.0.self_attn.q_norm.weight",
}


def _of_gguf(checkpoint):
    metadata = checkpoint.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ("llama", "qwen2", "qwen3"):
        raise ValueError(
            "The architecture of the file should be 'llama' (also of Mistral), 'qwen2' "
            f"or 'qwen3'. Got {architecture!r}."
        )
    get = lambda key: metadata.get(f"{architecture}.{key}")
    if get("expert_count"):
        raise ValueError(
            f"The model should have no experts. Got {get('expert_count')}."
        )
    kind, factor = get("rope.scaling.type"), get("rope.scaling.factor")
    if kind not in (None, "none", "linear"):
        raise ValueError(_unknown_scaling.format(kind))
    array = checkpoint.entries.get("rope_freqs.weight")

    def factors(_):
        if array is not None:
            return tuple(array.numpy().tolist())
        return (float(factor),) if kind == "linear" else None

    return {
        "depth": get("block_count"),
        "heads": get("attention.head_count"),
        "key_heads": get("attention.head_count_kv"),
        "head_size": get("attention.key_length"),
        "eps": get("attention.layer_norm_rms_epsilon"),
        "theta": get("rope.freq_base"),
        "factors": factors,
    }


def _of_folder(checkpoint):
    config = checkpoint.config
    names = config.get("architectures")
    known = [f"{name}ForCausalLM" for name in ("Llama", "Mistral", "Qwen2", "Qwen3")]
    if not isinstance(names, list) or len(names) != 1 or names[0] not in known:
        raise ValueError(
            "The `config.json` beside the model should have one of "
            f"{', '.join(known)} for 'architectures'. Got {names!r}."
        )
    # (transformers 5 keeps the base and the scaling under one key.)
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ("default", "linear", "llama3"):
        raise ValueError(_unknown_scaling.format(kind))

    def factors(frequencies):
        if kind == "default":
            return None
        factor = _number(rope, "factor")
        if kind == "linear":
            return (factor,)
        # Low frequencies are divided by `factor`, high ones are kept, and the others
        # are interpolated.
        length = _number(rope, "original_max_position_embeddings")
        low, high = _number(rope, "low_freq_factor"), _number(rope, "high_freq_factor")
        turns = length * frequencies / (2 * math.pi)
        share = np.clip((turns - low) / (high - low), 0, 1)
        return tuple((1 / ((1 - share) / factor + share)).tolist())

    return {
        "depth": config.get("num_hidden_layers"),
        "heads": config.get("num_attention_heads"),
        "key_heads": config.get("num_key_value_heads"),
        "head_size": config.get("head_dim"),
        "eps": config.get("rms_norm_eps"),
        "theta": rope.get("rope_theta", config.get("rope_theta")),
        "factors": factors,
        "is_tied": config.get("tie_word_embeddings"),
    }


_unknown_scaling = (
    "The scaling of the model's rotary frequencies should be linear, or as in "
    "Llama 3. Got {!r}."
)


def _count(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    found = default if values.get(key) is None else values[key]
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ValueError(_wrong.format("integer", key, found))
    return found


def _number(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    found = default if values.get(key) is None else values[key]
    if not isinstance(found, int | float) or not 0 < found < math.inf:
        raise ValueError(_wrong.format("number", key, found))
    return float(found)


_wrong = "The model's configuration should have a positive {} for {!r}. Got {!r}."
