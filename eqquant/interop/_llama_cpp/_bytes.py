from collections.abc import Iterator, Mapping
from typing import Any

from ._pre_tokenizer import pre_tokenizer
from ._values import Values
from ._vocabulary import normal, Token, Vocabulary


def is_of_bytes(tokenizer: Values) -> bool:
    """Whether a `tokenizer.json` merges pairs of bytes, like GPT-2, and not pieces of
    SentencePiece. Raises a `ValueError` if it does not merge pairs."""
    model = tokenizer.below("model")
    if model.get("type") != "BPE":
        raise model.wrong(
            "type", "'BPE', as in these architectures,", model.get("type")
        )
    for key in ("continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(key):
            raise model.wrong(key, "nothing, as in llama.cpp,", model.get(key))
    return not model.flag("byte_fallback", False)


def add_bytes(
    tokenizer: Values, vocabulary: Vocabulary, overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Adds the tokens of byte pairs to a vocabulary. (llama.cpp does not normalize
    Unicode, even if the configuration asks for NFC.) Returns the metadata of these
    tokens."""
    normalizer = tokenizer.below("normalizer").get("type")
    if normalizer not in (None, "NFC"):
        raise tokenizer.wrong("normalizer", "none, or NFC", normalizer)
    key = "tokenizer.ggml.pre"
    pre = overrides[key] if key in overrides else pre_tokenizer(tokenizer)
    for text, number in tokens_of(tokenizer).items():
        vocabulary.add(number, Token(text, 0.0, normal))
    merges = [f"{a} {b}" for a, b in merges_of(tokenizer)]
    if not merges:
        raise tokenizer.wrong("merges", "pairs", None)
    return {
        "tokenizer.ggml.model": "gpt2",
        key: pre,
        "tokenizer.ggml.merges": merges,
    }


def tokens_of(tokenizer: Values) -> dict[str, Any]:
    """Returns the numbers of tokens, by their text."""
    vocab = tokenizer.below("model").get("vocab")
    if not isinstance(vocab, dict):
        raise tokenizer.wrong("vocab", "tokens and their numbers", vocab)
    return vocab


def merges_of(tokenizer: Values) -> Iterator[tuple[str, str]]:
    """Yields the pairs to merge, in order of priority."""
    for merge in tokenizer.below("model").items("merges"):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        match pair:
            case [str(a), str(b)] if a and b and " " not in a + b:
                yield a, b
            case _:
                raise tokenizer.wrong("merges", "pairs of text without spaces", merge)
