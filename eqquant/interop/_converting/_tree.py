from collections.abc import Mapping
from typing import Any


def nested(arrays: Mapping[str, Any]) -> dict[str, Any]:
    """The tree that dotted names are the paths of: of dictionaries; and of lists, where
    the names below are 0, 1, ..., each of which is there."""
    groups: dict[str, dict[str, Any]] = {}
    found: dict[str, Any] = {}
    for name, x in arrays.items():
        first, dot, rest = name.partition(".")
        # A name may also be the beginning of another one.
        if not dot or first in arrays:
            found[name] = x
        else:
            groups.setdefault(first, {})[rest] = x
    return found | {first: _as_list(nested(group)) for first, group in groups.items()}


def _as_list(tree):
    keys = [str(i) for i in range(len(tree))]
    return [tree[key] for key in keys] if set(keys) == set(tree) else tree
