from collections.abc import Callable, Mapping
from typing import Any, TypeAlias


Names: TypeAlias = str | tuple[str, ...] | list[str] | None
Renaming: TypeAlias = (
    str
    | tuple[str, Names]
    | Mapping[str, Names]
    | Callable[[str], Names]
    | list["Renaming"]
)


def renamed(name: str, rename: Any, inverse: bool = False) -> tuple[str, ...]:
    """The new names of an array: one, several, or none.

    **Arguments:**

    - `rename`: as for [`eqquant.interop.load_into`][].
    - `inverse`: whether named tables give the names of llama.cpp, instead of those of
        Hugging Face.

    **Raises:**

    A `ValueError` or a `TypeError` if `rename` is not a rule.
    """
    if rename is None:
        return (name,)
    if isinstance(rename, list):
        names = (name,)
        for rule in rename:
            names = tuple(new for old in names for new in renamed(old, rule, inverse))
        return names
    return _by_rule(name, rename, inverse)


def _by_rule(name, rule, inverse):
    if isinstance(rule, str):
        if rule not in tables:
            raise ValueError(
                f"`rename` should name one of the tables {', '.join(tables)}. Got "
                f"{rule!r}."
            )
        rule = (inverse_tables if inverse else tables)[rule]
    if isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], str):
        rule = dict([rule])
    if isinstance(rule, Mapping):
        for pattern, names in rule.items():
            found = matched(pattern, name)
            if found is not None:
                return tuple(_filled(new, found, pattern) for new in _as_names(names))
        return (name,)
    if callable(rule):
        return _as_names(rule(name))
    raise TypeError(
        "`rename` should be the name of a table, a dictionary of patterns, a pair of a "
        f"pattern and a name, a function of a name, or a list of these. Got {rule!r}."
    )


def matched(pattern: str, name: str) -> list[str] | None:
    """The text that each `*` of a pattern matches: the shortest, except for the last.
    `None` if the pattern does not match."""
    first, *rest = pattern.split("*")
    if not rest:
        return [] if name == pattern else None
    *middle, last = rest
    if len(name) < len(first) + len(last):
        return None
    if not (name.startswith(first) and name.endswith(last)):
        return None
    left, found = name[len(first) : len(name) - len(last)], []
    for text in middle:
        start = left.find(text)
        if start < 0:
            return None
        found.append(left[:start])
        left = left[start + len(text) :]
    return [*found, left]


def _filled(name, found, pattern):
    parts = name.split("*")
    if len(parts) != len(found) + 1:
        raise ValueError(
            f"`rename` should have as many * in the name {name!r} as in its pattern "
            f"{pattern!r}."
        )
    return "".join(text for pair in zip(parts, [*found, ""]) for text in pair)


def _as_names(names: Any) -> tuple[str, ...]:
    if names is None:
        return ()
    found = tuple(names) if isinstance(names, tuple | list) else (names,)
    if not all(isinstance(name, str) for name in found):
        raise TypeError(f"`rename` should give names, or None. Got {names!r}.")
    return found


# From the names of a model's arrays in llama.cpp to those in Hugging Face transformers.
# Other names are unchanged.
llama: dict[str, str | None] = {
    "token_embd.*": "model.embed_tokens.*",
    "output_norm.*": "model.norm.*",
    "output.*": "lm_head.*",
    # Transformers computes these from the configuration.
    "rope_freqs.*": None,
    "blk.*.attn_norm.*": "model.layers.*.input_layernorm.*",
    "blk.*.attn_q.*": "model.layers.*.self_attn.q_proj.*",
    "blk.*.attn_k.*": "model.layers.*.self_attn.k_proj.*",
    "blk.*.attn_v.*": "model.layers.*.self_attn.v_proj.*",
    "blk.*.attn_output.*": "model.layers.*.self_attn.o_proj.*",
    "blk.*.attn_q_norm.*": "model.layers.*.self_attn.q_norm.*",
    "blk.*.attn_k_norm.*": "model.layers.*.self_attn.k_norm.*",
    "blk.*.ffn_norm.*": "model.layers.*.post_attention_layernorm.*",
    "blk.*.ffn_gate.*": "model.layers.*.mlp.gate_proj.*",
    "blk.*.ffn_up.*": "model.layers.*.mlp.up_proj.*",
    "blk.*.ffn_down.*": "model.layers.*.mlp.down_proj.*",
    "blk.*.ffn_gate_inp.*": "model.layers.*.mlp.gate.*",
    "blk.*.ffn_gate_exps.*": "model.layers.*.mlp.experts.gate_proj.*",
    "blk.*.ffn_up_exps.*": "model.layers.*.mlp.experts.up_proj.*",
    "blk.*.ffn_down_exps.*": "model.layers.*.mlp.experts.down_proj.*",
}

# Models of the same family have the same names.
tables: dict[str, dict[str, str | None]] = {
    "llama": llama,
    "mistral": llama,
    "qwen": llama,
}

# From the names of Hugging Face to those of llama.cpp.
inverse_tables: dict[str, dict[str, str | None]] = {
    key: {new: old for old, new in table.items() if new is not None}
    for key, table in tables.items()
}
