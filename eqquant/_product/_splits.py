import dataclasses
import itertools as it
from collections.abc import Callable, Sequence
from typing import Any

import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from ..formats import AbstractFormat, Rotated
from ._axes import as_tuple, Axis
from ._specs import as_entry, by_row_of, full_spec, names_of, number_of_shards


# The shardings that cut through no block and no byte.


def checked_by_row(
    sharding: NamedSharding, format: AbstractFormat, shape: Sequence[int], axis: Axis
) -> tuple[Any, ...]:
    """Returns the entries of a spec for the axes `*b n k`, which have this `shape`.
    Raises a `ValueError` if an axis cannot be split evenly, or only through a block or
    a byte. It names the nearest possible specs, and a possible format, if there is one.
    """
    *lead, k = shape
    ndim = len(lead) + len(as_tuple(axis))
    spec = full_spec(sharding.spec, ndim)
    reason = _refusal(spec, sharding.mesh, format, lead, k, axis)
    if reason is None:
        return by_row_of(spec, axis)
    fits = lambda spec: _refusal(spec, sharding.mesh, format, lead, k, axis) is None
    others = " or ".join(map(str, nearest_specs(spec, fits)))
    holds = lambda f: _refusal(spec, sharding.mesh, f, lead, k, axis) is None
    other = nearest_format(format, holds)
    instead = "" if other is None else f" Or take the format {other}."
    raise ValueError(
        f"{reason}. Shard another axis, or over fewer devices: the nearest possible "
        f"`sharding` is {others}. Got {spec}.{instead}"
    )


def _refusal(spec, mesh, format, lead, k, axis):
    # Returns why a spec does not fit, or `None`.
    first, *inner = [len(spec) + i for i in as_tuple(axis)]
    for i in inner:
        if spec[i] is not None:
            return f"Of the contracted axes {axis}, only the first can be split"
    shards = number_of_shards(mesh, spec[first])
    *others, _ = by_row_of(spec, axis)
    for size, entry in zip(lead, others):
        if size % number_of_shards(mesh, entry) != 0:
            shards = number_of_shards(mesh, entry)
            return f"An axis of size {size} cannot be split in {shards}"
    if lead and not splits_rows(format, lead[-1], number_of_shards(mesh, others[-1])):
        return (
            f"Splitting {lead[-1]} rows in {number_of_shards(mesh, others[-1])} would "
            f"cut through a group of {format.rows_together} rows, which {format} "
            "stores together"
        )
    if not splits_evenly(format, lead, k, shards):
        return (
            f"Splitting {k} contracted positions in {shards} would cut through a block "
            f"or a byte of {format}"
        )
    return None


def nearest_specs(
    spec: PartitionSpec, fits: Callable[[PartitionSpec], bool]
) -> list[PartitionSpec]:
    """Returns up to three specs that fit, the nearest to `spec` first: some mesh axes
    are moved to another axis of the array, or removed."""

    def changed(i, kept, j=None):
        entries = list(spec)
        moved = tuple(name for name in names_of(spec[i]) if name not in kept)
        entries[i] = as_entry(kept)
        if j is not None:
            entries[j] = as_entry((*names_of(spec[j]), *moved))
        return PartitionSpec(*entries)

    split = [i for i, entry in enumerate(spec) if entry is not None]
    subsets = [
        (i, kept)
        for i in split
        for number in range(len(names_of(spec[i])) - 1, -1, -1)
        for kept in it.combinations(names_of(spec[i]), number)
    ]
    moves = [
        changed(i, kept, j) for i, kept in subsets for j in range(len(spec)) if j != i
    ]
    fewer = [changed(i, kept) for i, kept in subsets]
    none = PartitionSpec(*[None] * len(spec))
    found = [new for new in (*moves, *fewer) if fits(new)] or [none]
    return list(dict.fromkeys(found))[:3]


def splits_rows(format: AbstractFormat, n: int, shards: int) -> bool:
    """Whether `n` rows split into equal shards that can be stored alone."""
    return shards == 1 or n % (shards * format.rows_together) == 0


def splits_evenly(
    format: AbstractFormat, lead: Sequence[int], k: int, shards: int
) -> bool:
    """Whether `k` contracted positions split into equal shards that each end with a
    block and a byte."""
    if shards == 1:
        return True
    if k % shards != 0 or not format.splits or k // shards % format.tile != 0:
        return False
    if isinstance(format, Rotated) and format.size(k) != format.size(k // shards):
        return False  # through a block that is rotated

    # A shard ends with a unit (a byte, a block) of a stored array if one more position
    # would begin another unit.

    def sizes(k):
        return [a.shape[-1] for a in jtu.tree_leaves(format.structs((*lead, k)))]

    return all(
        whole == 1 or after > before
        for whole, before, after in zip(
            sizes(k), sizes(k // shards), sizes(k // shards + 1)
        )
    )


def nearest_format(
    format: AbstractFormat, fits: Callable[[AbstractFormat], bool]
) -> AbstractFormat | None:
    """Returns the same format with another packing of codes, or with smaller blocks,
    that fits. `None` if there is none."""
    names = {field.name for field in dataclasses.fields(format)}
    variants = [format]
    if "radix" in names:
        variants.append(dataclasses.replace(format, radix=4))
    if "block_size" in names and format.block_size is not None:
        sizes = range(format.block_size, 0, -16)
        variants = [
            dataclasses.replace(v, block_size=size) for size in sizes for v in variants
        ]
    return next(filter(fits, variants), None)
