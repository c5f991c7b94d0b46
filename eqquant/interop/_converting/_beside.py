import json
import pathlib
from typing import Any


# What there may be in the folder of a model, besides its tensors.
_others = (
    "added_tokens.json",
    "chat_template.*",
    "generation_config.json",
    "merges.txt",
    "preprocessor_config.json",
    "special_tokens_map.json",
    "tokenizer*",
    "vocab*",
)
_largest = 2**26
_sections = ("quantization_config", "quantization")


def beside(
    source: pathlib.Path, config: dict[str, Any], said: dict[str, Any]
) -> dict[str, bytes]:
    """The other files of a model, by their names: the tokenizer's, as they are, and the
    configuration.

    **Arguments:**

    - `config`: of the source.
    - `said`: what it is to say instead of how arrays are quantized there.
    """
    folder = source if source.is_dir() else source.parent
    found = {
        path.name: path.read_bytes()
        for pattern in _others
        for path in sorted(folder.glob(pattern))
        if path.is_file() and path.stat().st_size <= _largest
    }
    config = {k: v for k, v in config.items() if k not in _sections} | said
    return found | ({"config.json": as_json(config)} if config else {})


def as_json(x: dict[str, Any]) -> bytes:
    return json.dumps(x, indent=2).encode()
