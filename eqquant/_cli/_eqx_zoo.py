import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any


# Architectures of llama.cpp, and of Hugging Face.
_architectures = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
# By their names in `config.json`, the metadata of GGUF without the architecture.
_keys = {
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_hidden_layers": "block_count",
    "num_attention_heads": "attention.head_count",
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
    "num_experts": "expert_count",
    "num_experts_per_tok": "expert_used_count",
    "moe_intermediate_size": "expert_feed_forward_length",
}
# The experts of a layer are one array.
_experts = "model.layers.{i}.mlp.experts"
_stacks = {f"{_experts}.{{e}}.{{x}}.weight": f"{_experts}.{{x}}.weight"}
_head = "lm_head.weight"


def load_model(path: pathlib.Path, config: pathlib.Path | None) -> Any:
    """Loads a model of eqx-zoo, `CausalLM`, from a folder of Hugging Face or from a
    file of GGUF.

    **Arguments:**

    - `config`: a folder with a `config.json`. By default, that of `path`, or the
        metadata of GGUF.

    **Raises:**

    A `ValueError` if there is no eqx-zoo, or if it has no such model. An `OSError` if a
    file cannot be read.
    """
    import equinox as eqx
    import jax

    from ..interop import load_into, open

    try:
        from eqx_zoo import CausalLM  # pyright: ignore
        from eqx_zoo.models.causal_lm.config import Config  # pyright: ignore
    except ImportError as e:
        raise ValueError(
            "it takes the package eqx-zoo, which has the models: with Python 3.12 or "
            "later, `pip install eqx-zoo`"
        ) from e
    with open(path) as checkpoint:
        rename: list[Any] = [_stacks]
        if checkpoint.kind == "gguf":
            rename = ["llama", *rename]
        found = _config(checkpoint, config)
        if found["tie_word_embeddings"]:
            rename.append({_head: None})
        try:
            found = Config.from_hf(found)
        except (KeyError, NotImplementedError) as e:
            raise ValueError(f"{path} has no model that eqx-zoo has: {e}") from e
        skeleton = eqx.filter_eval_shape(CausalLM, found, key=jax.random.key(0))
        return load_into(skeleton, checkpoint, rename)


def _config(checkpoint, folder) -> dict[str, Any]:
    if folder is not None:
        found = json.loads((folder / "config.json").read_text())
        if not isinstance(found, dict):
            raise ValueError(f"{folder / 'config.json'} should have an object")
    elif checkpoint.kind == "gguf":
        found = config_of_gguf(checkpoint)
    else:
        found = dict(checkpoint.config)
    if not found.get("architectures"):
        raise ValueError(
            "there should be a config.json with 'architectures' beside the file, or in "
            "a folder that --config names"
        )
    return {"tie_word_embeddings": False} | found


def config_of_gguf(checkpoint: Any) -> dict[str, Any]:
    """What `config.json` would say of the model in a GGUF file.

    **Raises:**

    A `ValueError` if it is of another architecture, or if something is missing.
    """
    metadata: Mapping[str, Any] = checkpoint.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in _architectures:
        raise ValueError(
            f"its architecture should be one of {', '.join(_architectures)}. Got "
            f"{architecture!r}"
        )
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in checkpoint:
        raise ValueError(
            "it scales its rotary frequencies, and --config should name a folder whose "
            "config.json says how"
        )
    found = {
        key: metadata[f"{architecture}.{name}"]
        for key, name in _keys.items()
        if f"{architecture}.{name}" in metadata
    }
    if "token_embd.weight" not in checkpoint:
        raise ValueError("it has no 'token_embd.weight'")
    vocabulary, _ = checkpoint.entries["token_embd.weight"].shape
    is_bad = [
        key
        for key, x in found.items()
        if type(x) not in (int, float) or not math.isfinite(x)
    ]
    if is_bad:
        raise ValueError(f"its metadata should have numbers for {', '.join(is_bad)}")
    # llama.cpp gives experts that were chosen shares that add up to one.
    return found | {
        "architectures": [_architectures[architecture]],
        "vocab_size": vocabulary,
        "norm_topk_prob": True,
        "tie_word_embeddings": "output.weight" not in checkpoint,
    }
