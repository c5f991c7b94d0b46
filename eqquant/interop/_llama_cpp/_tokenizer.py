import pathlib
from collections.abc import Mapping
from typing import Any

from .._containers import short
from ._bytes import add_bytes, is_of_bytes
from ._pieces import add_pieces, space
from ._special import special_tokens
from ._values import read_if_there, read_values, Values
from ._vocabulary import control, Token, unknown, user_defined, Vocabulary


def tokenizer_metadata(
    folder: pathlib.Path, config: Values, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the metadata of the tokenizer in a Hugging Face folder. Raises a
    `ValueError` if there is no tokenizer, if a file of it is damaged, or if llama.cpp
    does not support its kind for these architectures. The metadata in `overrides` are
    known already."""
    tokenizer = read_values(folder / "tokenizer.json")
    settings = read_values(folder / "tokenizer_config.json")
    if settings is None:
        settings = Values({}, repr(str(folder / "tokenizer_config.json")))
    model = read_if_there(folder / "tokenizer.model")
    if tokenizer is None and model is None:
        raise ValueError(
            f"{str(folder)!r} should have a 'tokenizer.json' or a 'tokenizer.model'. "
            "For a file without a tokenizer, pass the metadata "
            '{"tokenizer.ggml.model": "none"}.'
        )
    vocabulary = Vocabulary(config.count("vocab_size", most=_largest))
    try:
        if tokenizer is not None and is_of_bytes(tokenizer):
            found = add_bytes(tokenizer, vocabulary, overrides)
        else:
            found = add_pieces(tokenizer, model, vocabulary)
        _add_others(tokenizer, settings, vocabulary)
        found |= vocabulary.metadata(scores=found["tokenizer.ggml.model"] == "llama")
        found |= special_tokens(folder, config, tokenizer, settings, vocabulary, found)
    except ValueError as e:
        raise ValueError(f"Could not read the tokenizer of {str(folder)!r}: {e}") from e
    return found


# The largest vocabulary in a file.
_largest = 2**20


def _add_others(tokenizer, settings, vocabulary):
    # Adds the tokens that are looked for in text before it is split.
    if tokenizer is not None:
        tokens = tokenizer.objects("added_tokens")
        numbered = [(token.get("id"), token) for token in tokens]
    else:
        decoder = settings.below("added_tokens_decoder")
        keys = [key for key in decoder if key.isdecimal() and len(key) < 10]
        numbered = [(int(key), decoder.below(key)) for key in keys]
    for number, token in numbered:
        text, type = token.text("content"), user_defined
        if not isinstance(number, int):
            raise token.wrong("id", "a number", short(number))
        if token.flag("special", False):
            is_unknown = 0 <= number < len(vocabulary)
            is_unknown = is_unknown and vocabulary[number].type == unknown
            type = unknown if is_unknown else control
        else:
            # llama.cpp looks for these before it replaces spaces.
            text = text.replace(space, " ")
        vocabulary.add(number, Token(text, -1000.0, type))
