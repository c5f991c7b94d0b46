import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from .._containers import FileLayout, Part
from .._layouts import parts_of_each
from ._targets import Target


class Shard(NamedTuple):
    """A file to write: its name, its tensors, and their positions."""

    name: str
    parts: dict[str, Part]
    layout: FileLayout


def shards(
    target: Target, arrays: Mapping[str, Any], stem: str, most: int | None
) -> list[Shard]:
    """Distributes arrays over files, in order. All tensors of an array go to one file.
    Raises a `NotWritable` if arrays cannot be written, or a `ValueError` if two tensors
    would have the same name. `stem` is the prefix of their names. (Arrays may be
    structs without numbers.)

    - `most`: the largest number of bytes in a file that has several arrays. `None` for
        a single file.
    """
    groups: list[dict[str, Part]] = [{}]
    size = 0
    for parts in parts_of_each(target.parts, arrays).values():
        nbytes = sum(part.nbytes for part in parts.values())
        if most is not None and groups[-1] and size + nbytes > most:
            groups.append({})
            size = 0
        groups[-1] |= parts
        size += nbytes
    number, total = len(groups), sum(map(len, groups))
    return [
        Shard(
            _name(stem, target.suffix, i, number),
            parts,
            target.layout(parts, i, number, total),
        )
        for i, parts in enumerate(groups)
    ]


def index_of(target: Target, shards: list[Shard]) -> str | None:
    """Returns the index of several files as JSON, or `None` for a single file."""
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
