from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from .._containers import short


# Llama.cpp's types of tokens.
normal, unknown, control, user_defined, unused, byte = range(1, 7)


class Token(NamedTuple):
    """A token: its text, its score, and its type."""

    text: str
    score: float
    type: int


class Vocabulary:
    """Tokens by their numbers, as many as a model has embeddings. Numbers without a
    token become unused tokens; tokens beyond the last number are left out."""

    def __init__(self, size: int):
        self._tokens: list[Token | None] = [None] * size
        self._numbers: dict[str, int] = {}

    def add(self, number: Any, token: Token) -> None:
        """Adds a token, or replaces the one of the same number. Raises a `ValueError`
        if it has no number, or if another token has its text."""
        if type(number) is not int or number < 0:
            raise ValueError(
                f"the token {short(token.text)} should have a number. Got "
                f"{short(number)}."
            )
        if number >= len(self._tokens):
            return
        old = self._tokens[number]
        if old is not None:
            del self._numbers[old.text]
        if self._numbers.get(token.text, number) != number:
            raise ValueError(f"it has the token {short(token.text)} twice.")
        self._numbers[token.text], self._tokens[number] = number, token

    def number(self, text: Any) -> int | None:
        """Returns the number of a token, or `None` if there is no such token."""
        return self._numbers.get(text) if isinstance(text, str) else None

    def set_type(self, text: Any, type: int) -> None:
        """Changes the type of a token, if there is one of this text."""
        number = self.number(text)
        if number is not None:
            self._tokens[number] = self[number]._replace(type=type)

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, number: int) -> Token:
        token = self._tokens[number]
        return Token(f"[PAD{number}]", -1000.0, unused) if token is None else token

    def metadata(self, scores: bool) -> dict[str, Any]:
        """Returns the lists for a GGUF file. Raises a `ValueError` if there are no
        tokens."""
        if not self._numbers:
            raise ValueError("it has no tokens.")
        tokens = [self[i] for i in range(len(self._tokens))]
        if len({token.text for token in tokens}) < len(tokens):
            raise ValueError("it has tokens named [PAD...], like unused tokens.")
        _check_text(token.text for token in tokens)
        found: dict[str, Any] = {
            "tokenizer.ggml.tokens": [token.text for token in tokens],
            "tokenizer.ggml.token_type": _array(tokens, "type", np.int32),
        }
        if scores:
            found["tokenizer.ggml.scores"] = _array(tokens, "score", np.float32)
        return found


def _array(tokens, field, dtype):
    return np.array([getattr(token, field) for token in tokens], dtype)


def _check_text(texts: Iterable[str]) -> None:
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ValueError(f"the token {short(text)} should be text.") from None
