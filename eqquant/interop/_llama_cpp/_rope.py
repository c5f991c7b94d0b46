import math
from typing import Any

import numpy as np

from ._values import Values


def rope_values(config: Values, kind: str = "full_attention") -> Values:
    """Returns the parameters of rotary embeddings. Configurations store them as
    `rope_parameters` for all layers, as `rope_parameters` for each kind of layer, or as
    `rope_scaling` and `rope_theta`."""
    found = config.below("rope_parameters")
    if found.get(kind) is not None:
        return found.below(kind)
    if config.get("rope_parameters") is not None:
        return found
    scaling = config.below("rope_scaling")
    values = {key: scaling.get(key) for key in _keys}
    values["rope_theta"] = config.get("rope_theta")
    return Values(values, scaling.where if config.get("rope_scaling") else config.where)


def rope_metadata(config: Values, theta: float) -> dict[str, Any]:
    """Returns the metadata about rotary embeddings for llama.cpp, without the prefix of
    the architecture. Raises a `ValueError` if llama.cpp does not support these
    embeddings. `theta` is the base of frequencies, by default."""
    rope = rope_values(config)
    share = rope.number("partial_rotary_factor", config.number(_share, 1.0))
    if share != 1.0:
        raise rope.wrong(_share, "1, since llama.cpp rotates whole heads,", share)
    found: dict[str, Any] = {"rope.freq_base": rope.number("rope_theta", theta)}
    kind = rope_kind(rope)
    if kind not in ("default", "linear", "yarn", "llama3"):
        raise rope.wrong(
            "rope_type",
            "default, linear, yarn or llama3, as in llama.cpp,",
            kind,
        )
    if kind in ("linear", "yarn"):
        found["rope.scaling.type"] = kind
        found["rope.scaling.factor"] = rope.number("factor")
    if kind == "yarn":
        found |= _yarn(config, rope, found["rope.scaling.factor"])
    return found


def rope_kind(rope: Values) -> str:
    """Returns the name of the scaling of frequencies."""
    kind = rope.get("rope_type") or rope.get("type") or "default"
    return kind if isinstance(kind, str) else repr(kind)


def rope_factors(config: Values, size: int, theta: float) -> np.ndarray | None:
    """Returns the divisors of frequencies for Llama 3's scaling, `(size // 2,)`, or
    `None` for other scalings: `factor` for long waves, 1 for short waves, and
    interpolated divisors for the others. `size` is the size of a head, and `theta` the
    base of frequencies, by default."""
    rope = rope_values(config)
    if rope_kind(rope) != "llama3":
        return None
    base, factor = rope.number("rope_theta", theta), rope.number("factor")
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    if high <= low:
        raise rope.wrong("high_freq_factor", f"a number above {low}", high)
    length = rope.number("original_max_position_embeddings")
    waves = 2 * math.pi * base ** (np.arange(0, size, 2) / size)
    share = np.clip((length / waves - low) / (high - low), 0, 1)
    return (1 / ((1 - share) / factor + share)).astype(np.float32)


_share = "partial_rotary_factor"
_keys = (
    *("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast"),
    *("beta_slow", "mscale", "mscale_all_dim", "truncate"),
)


def _yarn(config, rope, factor):
    for key in ("mscale", "mscale_all_dim"):
        if rope.get(key):
            raise rope.wrong(key, "nothing, as in llama.cpp,", rope.get(key))
    if not rope.flag("truncate", True):
        raise rope.wrong("truncate", "true, as in llama.cpp,", False)
    whole = config.count("max_position_embeddings")
    length = rope.count("original_max_position_embeddings", whole)
    # llama.cpp always multiplies by this factor.
    usual = 1 + 0.1 * math.log(factor) if factor > 1 else 1.0
    return {
        "rope.scaling.original_context_length": length,
        "rope.scaling.attn_factor": rope.number("attention_factor", usual) / usual,
        "rope.scaling.yarn_beta_fast": rope.number("beta_fast", 32.0),
        "rope.scaling.yarn_beta_slow": rope.number("beta_slow", 1.0),
    }
