import re
import warnings
from typing import Any

from ._bytes import merges_of, tokens_of
from ._sentencepiece import read_sentencepiece
from ._special import special_key
from ._values import Values
from ._vocabulary import byte, normal, Token, unknown, user_defined, Vocabulary


space = "\u2581"
_byte = re.compile("<0x[0-9A-F]{2}>")


def add_pieces(
    tokenizer: Values | None, model: bytes | None, vocabulary: Vocabulary
) -> dict[str, Any]:
    """Adds the tokens of SentencePiece to a vocabulary, from `tokenizer.model` if there
    is one. llama.cpp merges the pair with the largest score first. Returns the metadata
    of these tokens."""
    prefix = tokenizer is not None and _has_prefix(tokenizer)
    special = {}
    if model is not None:
        found = read_sentencepiece(model, "'tokenizer.model'")
        for i, token in enumerate(found.tokens):
            if token.type == user_defined:
                token = token._replace(text=token.text.replace(space, " "))
            vocabulary.add(i, token)
        prefix = found.space_prefix if tokenizer is None else prefix
        special = {special_key(kind): i for kind, i in found.special.items()}
    elif tokenizer is not None:
        _add_from_merges(tokenizer, vocabulary)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.add_space_prefix": prefix,
        **special,
    }


def _add_from_merges(tokenizer, vocabulary):
    # A `tokenizer.json` has no scores, but its merges are in the order of scores.
    ranks: dict[str, int] = {}
    pairs, is_ordered, last = set(), True, None
    for rank, (a, b) in enumerate(merges_of(tokenizer)):
        piece = a + b
        is_ordered &= piece not in ranks or piece == last
        ranks.setdefault(piece, rank)
        pairs.add((a, b))
        last = piece
    texts = tokens_of(tokenizer)
    for text, number in texts.items():
        score = -float(ranks.get(text, len(ranks)))
        type = byte if _byte.fullmatch(text) else normal
        vocabulary.add(number, Token(text, score, type))
    vocabulary.set_type(tokenizer.below("model").get("unk_token"), unknown)
    added = {
        x["content"]
        for x in tokenizer.items("added_tokens")
        if isinstance(x, dict) and isinstance(x.get("content"), str)
    }
    if not is_ordered or not _has_all(pairs, texts.keys() - added):
        warnings.warn(
            f"{tokenizer.where} was not made from a model of SentencePiece: it merges "
            "only some of the pairs that make up its tokens, or in another order. "
            "llama.cpp merges them all, and may split some words in another way.",
            stacklevel=2,
        )


def _has_all(pairs, texts):
    # Whether there is a merge for every pair of tokens that makes up another token.
    return all(
        (text[:i], text[i:]) in pairs
        for text in texts
        if not _byte.fullmatch(text) and len(text) < 100
        for i in range(1, len(text))
        if text[:i] in texts and text[i:] in texts
    )


def _has_prefix(tokenizer):
    # Whether a space is prepended to text.
    for step in _steps(tokenizer.below("normalizer"), "normalizers"):
        kind = step.get("type")
        if kind == "Prepend" and step.get("prepend") == space:
            return True
        if kind != "Replace":
            raise tokenizer.wrong("normalizer", "Prepend and Replace only", kind)
    for step in _steps(tokenizer.below("pre_tokenizer"), "pretokenizers"):
        if step.get("type") == "Metaspace":
            scheme = step.get("prepend_scheme")
            if scheme is None:
                return step.flag("add_prefix_space", True)
            return scheme != "never"
    return False


def _steps(whole, key):
    if whole.get("type") is None:
        return []
    return whole.objects(key) if whole.get("type") == "Sequence" else [whole]
