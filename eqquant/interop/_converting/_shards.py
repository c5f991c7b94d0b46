import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._containers import FileLayout, Part
from ._targets import Target


class Shard(NamedTuple):
    """A file that is to be written."""

    name: str
    parts: dict[str, Part]
    layout: FileLayout


def shards(
    target: Target, arrays: Mapping[str, Any], stem: str, most: int | None
) -> list[Shard]:
    """The files that some arrays go to, in their order: all parts of one to the same.

    **Arguments:**

    - `arrays`: they, or stand-ins.
    - `stem`: what the names of the files begin with.
    - `most`: how many bytes of tensors a file may have, unless it is of one array. By
        default there is one file.

    **Raises:**

    A `ValueError` if one cannot be written, or if two would be written as one.
    """
    groups: list[dict[str, Part]] = [{}]
    owners: dict[str, str] = {}
    size = 0
    for name, x in arrays.items():
        parts = target.parts(name, x)
        nbytes = sum(part.nbytes for part in parts.values())
        if most is not None and groups[-1] and size + nbytes > most:
            groups.append({})
            size = 0
        for key, part in parts.items():
            if key in owners:
                raise ValueError(
                    f"{name!r} and {owners[key]!r} would both be written as {key!r}."
                )
            owners[key] = name
            groups[-1][key] = part
        size += nbytes
    number = len(groups)
    return [
        Shard(
            _name(stem, target.suffix, i, number),
            parts,
            target.layout(parts, i, number, len(owners)),
        )
        for i, parts in enumerate(groups)
    ]


def index_of(target: Target, shards: list[Shard]) -> str | None:
    """What the index of several files says. `None` if there is none."""
    if target.index is None or len(shards) == 1:
        return None
    parts = [part for shard in shards for part in shard.parts.values()]
    metadata = {"total_size": sum(part.nbytes for part in parts), **target.index}
    where = {key: shard.name for shard in shards for key in shard.parts}
    return json.dumps({"metadata": metadata, "weight_map": where}, indent=2)


def _name(stem, suffix, i, number):
    if number == 1:
        return f"{stem}{suffix}"
    return f"{stem}-{i + 1:05}-of-{number:05}{suffix}"
