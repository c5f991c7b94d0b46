from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from .._containers import short
from ._header import damaged


# Reads the nodes of the tree in a header, and the fields of its descriptions.


def wrong(what: str) -> ValueError:
    return damaged("its metadata is damaged", what)


def fitting(condition: bool, key: str, found: Any) -> None:
    """Raises the `ValueError` of damaged metadata if `condition` is false."""
    if not condition:
        raise wrong(f"{key!r} does not fit, and is {short(found)}")


def field(json: Any, key: str, *types: type) -> Any:
    """Returns a field of a description, which must have one of these types."""
    if not isinstance(json, dict) or key not in json:
        raise wrong(f"{key!r} is missing")
    fitting(type(json[key]) in types, key, json[key])
    return json[key]


def to_tree(json: Any, arrays: Mapping[str, Any], quantized: Mapping[str, Any]) -> Any:
    """Returns a tree from its description, in which the leaves are named."""
    if not isinstance(json, dict):
        if json is None or type(json) in (bool, int, float):
            return json
        raise wrong(f"its tree has {short(json)}")
    if len(json) != 1:
        raise wrong(f"its tree has {short(json)}")
    ((kind, value),) = json.items()
    if kind == "dict" and _are_pairs(value):
        # JAX sorts the keys of a plain dictionary, but these may not be comparable.
        found = OrderedDict(
            (_key(k), to_tree(child, arrays, quantized)) for k, child in value
        )
        if len(found) == len(value):
            return found
    elif kind == "list" and isinstance(value, list):
        return [to_tree(child, arrays, quantized) for child in value]
    elif kind == "complex" and _is_complex(value):
        return complex(*value)
    elif kind in ("array", "quantized") and isinstance(value, str):
        named = arrays if kind == "array" else quantized
        if value in named:
            return named[value]
    raise wrong(f"its tree has {short(json)}")


def to_on_call(json: Any) -> dict[tuple[Any, ...], bool]:
    """Returns the paths of modules that run under `implicit`, and whether all their
    methods do, from their description."""
    fitting(_are_pairs(json), "on_call", json)
    for path, every in json:
        fitting(isinstance(path, list) and type(every) is bool, "on_call", json)
    return {tuple(map(_key, path)): every for path, every in json}


def _are_pairs(value):
    return isinstance(value, list) and all(
        isinstance(pair, list) and len(pair) == 2 for pair in value
    )


def _is_complex(value):
    numbers = isinstance(value, list) and len(value) == 2
    return numbers and all(type(x) in (int, float) for x in value)


def _key(json):
    if isinstance(json, dict):
        raise wrong(f"its tree has the key {short(json)}")
    return tuple(map(_key, json)) if isinstance(json, list) else json
