from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from ._patterns import fields_of, filled, matched
from ._rules import Quantized, Several, Split, Transposed
from ._tables import inverse_tables, tables


# One rule: a dictionary of patterns, or a function of a name.
Rule: TypeAlias = Mapping[Any, Any] | Callable[[str], Any]
# The values of a dictionary of patterns.
New: TypeAlias = str | Split | Transposed | Quantized


def renamed(name: str, rename: Any, inverse: bool = False) -> tuple[str, ...]:
    """Returns the new names of an array: one, several, or none.

    **Arguments:**

    - `rename`: as in [`eqquant.interop.load_into`][].
    - `inverse`: whether named tables map to llama.cpp's names, instead of Hugging
        Face's.

    **Raises:**

    A `ValueError` or a `TypeError` if `rename` is not a rule, or does more than rename.
    """
    names = (name,)
    for rule in rules_of(rename, inverse):
        names = tuple(new for old in names for new in _by_rule(old, rule))
    return names


def rules_of(rename: Any, inverse: bool = False) -> list[Rule]:
    """Returns the rules of the argument `rename`, in the order in which they apply."""
    if rename is None:
        return []
    if isinstance(rename, list):
        return [rule for part in rename for rule in rules_of(part, inverse)]
    if isinstance(rename, str):
        if rename not in tables:
            raise ValueError(
                f"`rename` should name one of the tables {', '.join(tables)}. Got "
                f"{rename!r}."
            )
        return [(inverse_tables if inverse else tables)[rename]]
    if isinstance(rename, tuple) and len(rename) == 2:
        if isinstance(rename[0], str | Several):
            return [dict([rename])]
    if isinstance(rename, Mapping) and all(
        isinstance(k, str | Several) for k in rename
    ):
        return [rename]
    if callable(rename):
        return [rename]
    raise TypeError(
        "`rename` should be the name of a table, a dictionary of patterns, a pair of a "
        f"pattern and a name, a function of a name, or a list of these. Got {rename!r}."
    )


def has_table(rename: Any) -> bool:
    """Whether a table is among the rules of the argument `rename`."""
    if isinstance(rename, list):
        return any(map(has_table, rename))
    return isinstance(rename, str)


def as_names(names: Any) -> tuple[New, ...]:
    """Returns the names that a rule gives an array."""
    if names is None:
        return ()
    found = tuple(names) if isinstance(names, tuple | list) else (names,)
    if not all(isinstance(name, New) for name in found):
        raise TypeError(f"`rename` should give names, or None. Got {names!r}.")
    return found


def called(rule: Callable[[str], Any], name: str) -> tuple[str, ...]:
    """Returns the names that a function gives an array."""
    names = as_names(rule(name))
    if not all(isinstance(new, str) for new in names):
        raise TypeError(f"A function in `rename` should give names. Got {names!r}.")
    return tuple(map(str, names))


def _by_rule(name, rule):
    if not isinstance(rule, Mapping):
        return called(rule, name)
    for pattern, names in rule.items():
        for one in pattern.patterns if isinstance(pattern, Several) else (pattern,):
            found = matched(one, name)
            if found is None:
                continue
            if isinstance(pattern, Several):
                raise _not_of_names(name, pattern)
            news = [_plain(new, found.fields, name) for new in as_names(names)]
            return tuple(filled(n, found.stars, found.fields, pattern) for n in news)
    return (name,)


def _plain(new, fields, name):
    if not isinstance(new, str) or set(fields_of(new)) != set(fields):
        raise _not_of_names(name, new)
    return new


def _not_of_names(name, rule):
    return ValueError(
        f"`rename` should give {name!r} other names, and here it cannot join, add, "
        "split, stack, transpose or quantize arrays, as `load_into` does. Got "
        f"{rule!r}."
    )
