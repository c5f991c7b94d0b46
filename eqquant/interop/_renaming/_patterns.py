import functools as ft
import re
from collections.abc import Mapping
from typing import NamedTuple


class Match(NamedTuple):
    """The text that each `*`, and each field in braces, matches."""

    stars: tuple[str, ...]
    fields: dict[str, str]


_token = re.compile(r"(\*|\{[^{}]*\})")
# Regular expressions backtrack too long on longer names.
_longest = 1000


@ft.lru_cache(maxsize=1000)
def fields_of(pattern: str) -> tuple[str, ...]:
    """Returns the fields of a pattern, each once, in order. Raises a `ValueError` if
    there is anything but a name in braces."""
    found = [part[1:-1] for part in _token.split(pattern) if part.startswith("{")]
    for field in found:
        if not field.isidentifier():
            raise ValueError(
                "`rename` should have names in braces, as in 'layers.{i}.weight'. Got "
                f"{pattern!r}."
            )
    return tuple(dict.fromkeys(found))


def matched(pattern: str, name: str) -> Match | None:
    """Returns the text that the wildcards of a pattern match, or `None` if the pattern
    does not match. Wildcards match the shortest text, except for the last `*`. The text
    of a field has no dots."""
    if not fields_of(pattern):
        found = _by_stars(pattern, name)
        return None if found is None else Match(tuple(found), {})
    if len(name) > _longest:
        raise ValueError(
            f"Names should have {_longest} characters at most to match {pattern!r}. "
            f"Got one that begins with {name[:100]!r}."
        )
    found = _regex(pattern).fullmatch(name)
    if found is None:
        return None
    fields = found.groupdict()
    numbers = set(found.re.groupindex.values())
    stars = tuple(
        text for i, text in enumerate(found.groups(), start=1) if i not in numbers
    )
    return Match(stars, fields)


@ft.lru_cache(maxsize=1000)
def _regex(pattern):
    known: set[str] = set()

    def part(text):
        if text == "*":
            return "(.*?)"
        if not text.startswith("{"):
            return re.escape(text)
        field = text[1:-1]
        if field in known:
            return f"(?P={field})"
        known.add(field)
        return f"(?P<{field}>[^.]+?)"

    return re.compile("".join(map(part, _token.split(pattern))), re.DOTALL)


def _by_stars(pattern, name):
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


def filled(
    name: str, stars: tuple[str, ...], fields: Mapping[str, str], pattern: str
) -> str:
    """Returns a name with its wildcards replaced by the text that `pattern` matched.
    Raises a `ValueError` if the name has more or fewer `*` than the pattern."""
    parts = _token.split(name)
    if parts.count("*") != len(stars):
        raise ValueError(
            f"`rename` should have as many * in the name {name!r} as in its pattern "
            f"{pattern!r}."
        )
    left = iter(stars)
    return "".join(
        next(left)
        if part == "*"
        else fields[part[1:-1]]
        if part.startswith("{")
        else part
        for part in parts
    )
