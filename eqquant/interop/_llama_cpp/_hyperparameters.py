import math
from collections.abc import Callable
from typing import Any, TypeAlias

from ._rope import rope_metadata, rope_values
from ._values import Values


# Returns the metadata of a configuration, by keys without the architecture's prefix.
Hyperparameters: TypeAlias = Callable[[Values], dict[str, Any]]

# Llama.cpp's limit.
most_layers = 512


def llama(config: Values) -> dict[str, Any]:
    """Returns the hyperparameters of Llama and Mistral. The context of the file is the
    window of the attention, since llama.cpp has no windows for this architecture."""
    found = _common(config, theta=1e4) | {"vocab_size": config.count("vocab_size")}
    _check_activation(config, "silu")
    window = config.get("sliding_window")
    if window is not None:
        found = _within(found, config.count("sliding_window"))
    return found


def qwen(config: Values) -> dict[str, Any]:
    """Returns the hyperparameters of Qwen 2 and 3, with windows as in `llama`."""
    found = _common(config, theta=1e4)
    _check_activation(config, "silu")
    if config.flag("use_sliding_window", False):
        found = _within(found, config.count("sliding_window"))
    return found


def gemma(config: Values) -> dict[str, Any]:
    found = _common(config, theta=1e4)
    # The first release has "gelu" under another key, but uses the tanh approximation.
    if config.get("hidden_activation") is not None:
        _check_activation(config, "gelu_pytorch_tanh", "hidden_activation")
    return found


def gemma2(config: Values) -> dict[str, Any]:
    found = _common(config, theta=1e4)
    _check_activation(config, "gelu_pytorch_tanh", "hidden_activation")
    _check_scale(config, 46)
    layers = config.count("num_hidden_layers", most=most_layers)
    return (
        found
        | _softcaps(config, "attn_logit_softcapping", "final_logit_softcapping")
        | _windows(config, [i % 2 == 0 for i in range(layers)], 2)
    )


def gemma3(config: Values) -> dict[str, Any]:
    found = _common(config, theta=1e6)
    _check_activation(config, "gelu_pytorch_tanh", "hidden_activation")
    _check_scale(config, 62)
    if config.get("attn_logit_softcapping") is not None:
        raise config.wrong(
            "attn_logit_softcapping",
            "null, as in llama.cpp,",
            config.get("attn_logit_softcapping"),
        )
    if config.get("final_logit_softcapping") is not None:
        found |= _softcaps(config, "final_logit_softcapping")
    if config.get("sliding_window") is None:
        return found
    if config.flag("use_bidirectional_attention", False):
        raise config.wrong(
            "use_bidirectional_attention", "false, as in llama.cpp,", True
        )
    period = config.count("sliding_window_pattern", 6)
    layers = config.count("num_hidden_layers", most=most_layers)
    local = rope_values(config, "sliding_attention")
    is_whole = config.get("rope_parameters") is None
    theta = config.number("rope_local_base_freq", 1e4)
    return (
        found
        | {"rope.freq_base_swa": theta if is_whole else local.number("rope_theta", 1e4)}
        | _windows(config, [(i + 1) % period != 0 for i in range(layers)], 6)
    )


def head_size(config: Values) -> int:
    """Returns the size of a head."""
    heads = config.count("num_attention_heads")
    return config.count("head_dim", max(1, config.count("hidden_size") // heads))


def _common(config, theta):
    heads, size = config.count("num_attention_heads"), head_size(config)
    if size % 2 == 1:
        raise config.wrong("head_dim", "an even number", size)
    return {
        "block_count": config.count("num_hidden_layers", most=most_layers),
        "context_length": config.count("max_position_embeddings"),
        "embedding_length": config.count("hidden_size"),
        "feed_forward_length": config.count("intermediate_size"),
        "attention.head_count": heads,
        "attention.head_count_kv": config.count("num_key_value_heads", heads),
        "attention.layer_norm_rms_epsilon": config.number("rms_norm_eps"),
        "attention.key_length": size,
        "attention.value_length": size,
        "rope.dimension_count": size,
        **rope_metadata(config, theta),
    }


def _within(found, window):
    return found | {"context_length": min(found["context_length"], window)}


def _softcaps(config, *keys):
    return {key: config.number(key) for key in keys}


def _check_activation(config, wanted, key="hidden_act"):
    found = config.get(key)
    if found != wanted:
        raise config.wrong(key, f"{wanted!r}, as in llama.cpp,", found)


def _check_scale(config, largest):
    # llama.cpp scales scores differently for the largest model, which it recognizes by
    # the number of layers.
    size = head_size(config)
    if config.count("num_hidden_layers", most=most_layers) == largest:
        size = config.count("hidden_size") // config.count("num_attention_heads")
    found = config.number("query_pre_attn_scalar", size)
    if not math.isclose(found, size):
        raise config.wrong("query_pre_attn_scalar", f"{size}, as in llama.cpp,", found)


def _windows(config, default, period):
    # Returns the metadata about the layers that attend to a window.
    found = {"attention.sliding_window": config.count("sliding_window")}
    kinds = config.items("layer_types")
    windows = [kind == "sliding_attention" for kind in kinds] or default
    wrong = any(kind not in ("sliding_attention", "full_attention") for kind in kinds)
    if wrong or len(windows) != len(default):
        wanted = "'full_attention' or 'sliding_attention' for each layer"
        raise config.wrong("layer_types", wanted, kinds)
    usual = [(i + 1) % period != 0 for i in range(len(windows))]
    if windows != usual:
        found["attention.sliding_window_pattern"] = windows
    return found
