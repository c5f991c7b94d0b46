import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any


# Maps llama.cpp's names of architectures to Hugging Face's.
_architectures = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3moe": "Qwen3MoeForCausalLM",
}
# Maps keys of `config.json` to keys of GGUF's metadata, without the prefix of the
# architecture.
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
_needed = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
_reals = ("rms_norm_eps", "rope_theta")
# The errors that eqx-zoo raises for a configuration that it does not expect.
_of_another_model = (
    *(ArithmeticError, AttributeError, LookupError, NotImplementedError),
    *(TypeError, ValueError),
)
# eqx-zoo stacks the experts of a layer in one array.
_experts = "model.layers.{i}.mlp.experts"
_stacks = {f"{_experts}.{{e}}.{{x}}.weight": f"{_experts}.{{x}}.weight"}
_head = "lm_head.weight"
_embedding = "token_embd.weight"


def load_model(path: pathlib.Path, config: pathlib.Path | None, largest: int) -> Any:
    """Loads an eqx-zoo `CausalLM` from a Hugging Face folder or a GGUF file. Raises a
    `ValueError` if eqx-zoo is not installed, or does not support the model.
    Raises an `OSError` if a file cannot be read.

    - `config`: a folder with a `config.json`. By default, the `config.json` in `path`,
        or the metadata of GGUF.
    - `largest`: the largest token that the model must have in its vocabulary.
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
        rename = renaming(checkpoint)
        found = _config(checkpoint, config)
        if largest >= found.get("vocab_size", largest + 1):
            raise ValueError(
                f"{path} has tokens up to {found['vocab_size'] - 1}. Got {largest}"
            )
        if found["tie_word_embeddings"]:
            rename.append({_head: None})
        try:
            found = Config.from_hf(found)
            skeleton = eqx.filter_eval_shape(CausalLM, found, key=jax.random.key(0))
        except _of_another_model as e:
            raise ValueError(
                f"{path} has no model that eqx-zoo has: {type(e).__name__}, {e}"
            ) from e
        return load_into(skeleton, checkpoint, rename)


def renaming(checkpoint: Any) -> list[Any]:
    """Returns the rules that rename the arrays of a file for eqx-zoo. A file of eqquant
    may have the names of llama.cpp, too."""
    return ["llama", _stacks] if _embedding in checkpoint else [_stacks]


def _config(checkpoint, folder) -> dict[str, Any]:
    if folder is not None:
        found = _read(folder / "config.json")
    elif checkpoint.kind == "gguf" or "general.architecture" in checkpoint.metadata:
        found = config_of_gguf(checkpoint)
    else:
        found = dict(checkpoint.config)
    if not found.get("architectures"):
        raise ValueError(
            "there should be a config.json with 'architectures' beside the file, or in "
            "a folder that --config names"
        )
    _check_numbers(found)
    return {"tie_word_embeddings": False} | found


def _read(path):
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (RecursionError, ValueError) as e:
        raise ValueError(f"{path} is not JSON: {e}") from e
    if not isinstance(found, dict):
        raise ValueError(f"{path} should have an object")
    return found


def _check_numbers(config):
    for key in (*_keys, "vocab_size"):
        x, is_count = config.get(key), key not in _reals
        # The value may be null for features that a family of models lacks.
        if x is None and (key not in config or key not in _needed):
            continue
        kinds = (int,) if is_count else (int, float)
        if not isinstance(x, kinds) or x is True or not 0 < x < 2**31:
            what = "a positive integer" if is_count else "a positive number"
            text = f"its configuration should have {what} for {key}. Got {x!r}"
            raise ValueError(text)


def config_of_gguf(checkpoint: Any) -> dict[str, Any]:
    """Returns the equivalent of `config.json` for the model in a GGUF file. Raises a
    `ValueError` if its architecture is not supported, or if metadata are missing."""
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
            "it scales its rotary frequencies: --config should name a folder whose "
            "config.json describes the scaling"
        )
    found = {
        key: metadata[f"{architecture}.{name}"]
        for key, name in _keys.items()
        if f"{architecture}.{name}" in metadata
    }
    if _embedding not in checkpoint:
        raise ValueError(f"it has no {_embedding!r}")
    vocabulary, _ = checkpoint.entries[_embedding].shape
    is_bad = [
        key
        for key, x in found.items()
        if type(x) not in (int, float) or not math.isfinite(x)
    ]
    if is_bad:
        raise ValueError(f"its metadata should have numbers for {', '.join(is_bad)}")
    # llama.cpp normalizes the weights of the chosen experts to sum to one.
    return found | {
        "architectures": [_architectures[architecture]],
        "vocab_size": vocabulary,
        "norm_topk_prob": True,
        "tie_word_embeddings": "output.weight" not in checkpoint,
    }
