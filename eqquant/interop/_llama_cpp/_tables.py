from collections.abc import Iterator, Mapping
from typing import Any

from .._containers import short
from ._special import special_key
from ._values import Values
from ._vocabulary import control, normal, user_defined


_key = "tokenizer.ggml.{}".format


class Tables:
    """The tables of a tokenizer in the metadata of a GGUF file. Raises a `ValueError`
    if the tables are missing or damaged.

    - `numbers`: the numbers of tokens, by their text.
    """

    numbers: dict[str, int]

    def __init__(self, metadata: Mapping[str, Any]):
        self._values = Values(dict(metadata), "the metadata")
        tokens = self._list("tokens", str)
        self.numbers = {text: i for i, text in enumerate(tokens)}
        if len(self.numbers) < len(tokens) or not tokens:
            raise self._values.wrong(_key("tokens"), "tokens that differ", tokens[:3])
        self._tokens = tokens
        self._types = self._of_each("token_type", normal, int)

    def special(self) -> Iterator[tuple[str, bool]]:
        """Yields the tokens that are looked for in text before it is split, and whether
        they are control tokens."""
        for text, type in zip(self._tokens, self._types):
            if type in (control, user_defined) and text:
                yield text, type == control

    def merges(self) -> list[tuple[str, str]]:
        """Returns the pairs of tokens to merge, in order of priority."""
        found = []
        for text in self._list("merges", str):
            # A token may begin with a space.
            at = text.find(" ", 1)
            pair = text[:at], text[at + 1 :]
            if at < 0 or not {*pair, "".join(pair)} <= self.numbers.keys():
                wanted = "pairs of tokens that make up another"
                raise self._values.wrong(_key("merges"), wanted, text)
            found.append(pair)
        return found

    def merges_by_scores(self) -> list[tuple[str, str]]:
        """Returns all pairs of tokens that make up another token, in order of
        decreasing scores of that token."""
        scores = self._of_each("scores", 0.0, float)
        lengths = {len(text) for text in self._tokens}
        found = []
        for i, (text, type) in enumerate(zip(self._tokens, self._types)):
            if type not in (normal, user_defined):
                continue
            # Try only lengths of tokens: in a damaged file, a token may have a
            # megabyte.
            for at in lengths:
                pair = text[:at], text[at:]
                if all(pair) and {*pair} <= self.numbers.keys():
                    found.append((-scores[i], i, *map(self.numbers.get, pair), pair))
        return [pair for *_, pair in sorted(found)]

    def token(self, kind: str, default: int | None = None) -> tuple[str, int]:
        """Returns the text and the number of a token: `"bos"`, `"eos"` or `"unk"`."""
        number = self._values.get(special_key(kind))
        number = default if number is None else number
        if type(number) is not int or not 0 <= number < len(self._tokens):
            wanted = "the number of a token"
            raise self._values.wrong(special_key(kind), wanted, number)
        return self._tokens[number], number

    def flag(self, key: str, default: bool) -> bool:
        """Returns a boolean, such as `"add_bos_token"`."""
        return self._values.flag(_key(key), default)

    def _of_each(self, key, default, kind):
        found = self._list(key, kind) or [default] * len(self._tokens)
        if len(found) != len(self._tokens):
            wanted = f"{len(self._tokens)} numbers, one for each token,"
            raise self._values.wrong(_key(key), wanted, len(found))
        return found

    def _list(self, key, kind):
        found = self._values.items(_key(key))
        for x in found:
            if type(x) is not kind:
                wanted = {str: "text", int: "integers", float: "numbers"}[kind]
                raise self._values.wrong(_key(key), wanted, short(x))
        return found
