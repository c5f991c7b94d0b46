import pathlib
from collections.abc import Mapping
from typing import Any

from ._values import read_if_there, read_values, Values
from ._vocabulary import Vocabulary


# Maps Hugging Face's names to llama.cpp's.
_kinds = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def special_key(kind: str) -> str:
    """Returns the key of the metadata with the number of a token: `"bos"`, `"eos"`,
    `"unk"` or `"pad"`."""
    return f"tokenizer.ggml.{_kinds[kind]}_token_id"


def special_tokens(
    folder: pathlib.Path,
    config: Values,
    tokenizer: Values | None,
    settings: Values,
    vocabulary: Vocabulary,
    known: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the metadata about special tokens, from `tokenizer.json` and the
    `settings` in `tokenizer_config.json`, or else as `known`: their numbers, which of
    them are added to text, and the chat template. Raises a `ValueError` if a token that
    is added to text has no number."""
    more = read_values(folder / "special_tokens_map.json") or Values({}, "")
    numbers = {}
    for kind in _kinds:
        numbers[kind] = vocabulary.number(_content(settings.get(f"{kind}_token")))
        if numbers[kind] is None:
            numbers[kind] = vocabulary.number(_content(more.get(f"{kind}_token")))
        if numbers[kind] is None:
            numbers[kind] = _first(config.get(f"{kind}_token_id"), len(vocabulary))
        if numbers[kind] is None:
            numbers[kind] = _first(known.get(special_key(kind)), len(vocabulary))
    if numbers["unk"] is None and tokenizer is not None:
        unknown = tokenizer.below("model").get("unk_token")
        numbers["unk"] = vocabulary.number(unknown)
    added = _added(tokenizer, settings, vocabulary, numbers)
    found: dict[str, Any] = {
        special_key(kind): i for kind, i in numbers.items() if i is not None
    }
    for kind, adds in added.items():
        if adds and numbers[kind] is None:
            raise settings.wrong(f"{kind}_token", "a token of the vocabulary", None)
        found[f"tokenizer.ggml.add_{kind}_token"] = adds
    template = _template(folder, settings)
    return found if template is None else found | {"tokenizer.chat_template": template}


def _content(token):
    # Tokens are strings, or objects with a content.
    return token.get("content") if isinstance(token, dict) else token


def _first(number, size):
    # If several tokens end a text, returns the first.
    number = number[0] if isinstance(number, list) and number else number
    return number if type(number) is int and 0 <= number < size else None


def _added(tokenizer, settings, vocabulary, numbers):
    """Returns whether a token is added at the beginning (bos), and at the end (eos)."""
    whole = Values({}, "") if tokenizer is None else tokenizer.below("post_processor")
    is_sequence = whole.get("type") == "Sequence"
    for step in whole.objects("processors") if is_sequence else [whole]:
        if step.get("type") == "TemplateProcessing":
            return _of_template(step, vocabulary, numbers)
    # Without a `tokenizer.json`, the classes for SentencePiece add the first one.
    return {
        "bos": settings.flag("add_bos_token", tokenizer is None),
        "eos": settings.flag("add_eos_token", False),
    }


def _of_template(step, vocabulary, numbers):
    parts = step.objects("single")
    places = [i for i, part in enumerate(parts) if part.get("Sequence") is not None]
    if len(places) != 1:
        raise step.wrong("single", "one sequence", step.get("single"))
    (place,) = places
    found = {"bos": place > 0, "eos": place < len(parts) - 1}
    for kind, around in (("bos", parts[:place]), ("eos", parts[place + 1 :])):
        names = [part.below("SpecialToken").get("id") for part in around]
        those = [vocabulary.number(name) for name in names]
        if len(those) == 1 and numbers[kind] is None:
            numbers[kind] = those[0]
        if those and (those != [numbers[kind]] or those == [None]):
            raise step.wrong("single", f"the {kind} token, as in llama.cpp,", names)
    return found


def _template(folder, settings):
    found = settings.get("chat_template")
    if isinstance(found, list):
        named = settings.objects("chat_template")
        own = [x.get("template") for x in named if x.get("name") == "default"]
        found = own[0] if own else None
    if found is None:
        data = read_if_there(folder / "chat_template.jinja")
        found = None if data is None else data.decode()
    if found is None:
        other = read_values(folder / "chat_template.json")
        found = None if other is None else other.get("chat_template")
    if found is not None and not isinstance(found, str):
        raise settings.wrong("chat_template", "text", found)
    return found
