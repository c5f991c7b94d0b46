from typing import Any

from ._base import Source


def said(source: Source, key: str) -> list[Any]:
    """What the configuration of compressed-tensors says about weights: of each of its
    groups of layers. Which layers those are is left open: it is said in regular
    expressions, that a file could make take forever; and the shapes tell it."""
    groups = source.config.get("config_groups")
    found = [source.config.get(key)]
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found.append(weights.get(key))
    return [value for value in found if value is not None]
