import os
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from .._checkpoint import Checkpoint
from .._layouts import check_architecture
from .._open import open
from ._families import architectures, families, Family
from ._hyperparameters import head_size
from ._rope import rope_factors
from ._tokenizer import tokenizer_metadata
from ._values import read_values, Values


class Description(NamedTuple):
    """The description of a model that llama.cpp needs besides its weights.

    - `family`: the family of the model. `None` if only llama.cpp knows the
      hyperparameters and names of its architecture.
    - `metadata`: the hyperparameters and the tokenizer.
    - `factors`: the divisors of rotary frequencies, if there are any.
    - `is_tied`: whether the embedding is also the output matrix. `None` if unknown.
    """

    family: Family | None
    metadata: dict[str, Any]
    factors: np.ndarray | None
    is_tied: bool | None


def describe(
    config: str | os.PathLike[str] | Checkpoint, overrides: Mapping[str, Any]
) -> Description:
    """Reads the description of a model from a Hugging Face folder, or from a GGUF file,
    opened or not. The metadata in `overrides` take precedence. Raises a `ValueError` if
    a part is missing, damaged, or unknown to llama.cpp."""
    if isinstance(config, Checkpoint):
        return _from_gguf(config, overrides)
    path = pathlib.Path(config)
    if path.is_dir() and (path / "config.json").exists():
        return _from_folder(path, overrides)
    if path.is_dir() and not any(path.glob("*.gguf")):
        raise ValueError(f"{str(path)!r} should have a 'config.json'.")
    with open(path) as checkpoint:
        return _from_gguf(checkpoint, overrides)


def _from_gguf(checkpoint, overrides):
    if checkpoint.kind != "gguf":
        raise ValueError(
            "`config` should be a folder with a 'config.json', or a GGUF file. Got "
            f"{checkpoint}."
        )
    metadata = {
        key: value
        for key, value in checkpoint.metadata.items()
        if not key.startswith("split.") and key not in _of_types
    } | overrides
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(
            "`config` should have the metadata 'general.architecture'. Got "
            f"{architecture!r}."
        )
    check_architecture(
        metadata,
        "Pass its metadata as `metadata` instead, and arrays in the order of this "
        "architecture.",
    )
    factors = None
    if "rope_freqs.weight" in checkpoint:
        factors = checkpoint.entries["rope_freqs.weight"].numpy().copy()
    return Description(architectures.get(architecture), metadata, factors, None)


# These metadata are computed for each file.
_of_types = ("general.file_type", "general.quantization_version")


def _from_folder(folder, overrides):
    config = read_values(folder / "config.json") or Values({}, "its configuration")
    names = config.items("architectures")
    name = names[0] if len(names) == 1 else None
    if not isinstance(name, str) or name not in families:
        wanted = f"one of {', '.join(families)}, as far as this library knows llama.cpp"
        raise config.wrong("architectures", wanted, names or None)
    family = families[name]
    try:
        found = family.hyperparameters(config)
    except ValueError as e:
        raise ValueError(f"Could not read the configuration of a {name}: {e}") from e
    metadata: dict[str, Any] = {
        "general.architecture": family.architecture,
        "general.name": folder.resolve().name,
        **{f"{family.architecture}.{key}": value for key, value in found.items()},
    }
    if "tokenizer.ggml.model" not in overrides:
        metadata |= tokenizer_metadata(folder, config, overrides)
    metadata[f"{family.architecture}.vocab_size"] = config.count("vocab_size")
    factors = rope_factors(config, head_size(config), 1e4)
    if factors is not None and not family.has_factors:
        raise config.wrong(
            "rope_type", "a kind other than llama3, as in llama.cpp,", "llama3"
        )
    is_tied = config.flag("tie_word_embeddings", family.is_tied)
    if not is_tied and not family.has_head:
        raise config.wrong("tie_word_embeddings", "true, as in llama.cpp,", False)
    return Description(family, metadata | overrides, factors, is_tied)
