import dataclasses
import itertools as it
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..formats import AbstractFormat, Layout, Rotated, Stored
from ._axes import as_tuple, Axis, logical


def full_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """Returns the spec with one entry for each axis."""
    if len(spec) > ndim:
        raise ValueError(
            f"`sharding` should have at most {ndim} entries, one for each axis. Got "
            f"{spec}."
        )
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)))


def spec_of(sharding: NamedSharding | PartitionSpec) -> PartitionSpec:
    """Returns the spec of a sharding."""
    return sharding.spec if isinstance(sharding, NamedSharding) else sharding


def with_spec(
    sharding: NamedSharding | PartitionSpec, spec: PartitionSpec
) -> NamedSharding | PartitionSpec:
    if isinstance(sharding, NamedSharding):
        return NamedSharding(sharding.mesh, spec)
    return spec


def declared_by_row(
    sharding: NamedSharding | PartitionSpec | None, axis: Axis, ndim: int
) -> NamedSharding | None:
    """Returns the declared sharding over `*b n k`, on its own mesh or on the current
    one. `None` if there is no such mesh, or if it has Explicit axes, since types then
    carry the sharding."""
    if isinstance(sharding, NamedSharding):
        mesh = sharding.mesh
    else:
        mesh = jax.sharding.get_abstract_mesh()
    if mesh.explicit_axes or not mesh.auto_axes:
        return None
    spec = PartitionSpec() if sharding is None else spec_of(sharding)
    names = [name for entry in spec for name in names_of(entry)]
    if not set(names) <= set(mesh.axis_names):
        return None
    entries = by_row_of((*[None] * (ndim - len(spec)), *spec), axis)
    entries = (None, *entries) if len(entries) == 1 else entries
    return NamedSharding(mesh, PartitionSpec(*entries))


def by_types(fn: Callable, out_sharding: Any) -> Callable:
    """Runs `fn` under `jax.sharding.auto_axes`, with this sharding of its results.
    Returns `fn` itself if `out_sharding` is `None`, or on a mesh without Explicit
    axes."""
    shardings = jtu.tree_leaves(out_sharding)
    if not any(sharding.mesh.explicit_axes for sharding in shardings):
        return fn
    return jax.sharding.auto_axes(fn, out_sharding=out_sharding)


def place(
    stored: Stored, sharding: NamedSharding, layout: Layout, axis: Axis
) -> Stored:
    """Places stored arrays so that the array is sharded in this way. Raises a
    `ValueError` if that would split a block or a byte."""
    shape = layout.shape(stored)
    entries = checked_by_row(sharding, layout.format, shape, axis)

    def place_one(a):
        spec = stored_spec(a.shape, entries, layout)
        return placed(a, NamedSharding(sharding.mesh, spec))

    return jtu.tree_map(place_one, stored)


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


def by_row_of(spec: PartitionSpec | tuple[Any, ...], axis: Axis) -> tuple[Any, ...]:
    """Converts one entry for each logical axis to one for each of `*b n k`."""
    axes = [len(spec) + i for i in as_tuple(axis)]
    lead = [entry for i, entry in enumerate(spec) if i not in axes]
    return (*lead, spec[axes[0]])


def stored_spec(
    shape: Sequence[int], entries: tuple[Any, ...], layout: Layout
) -> PartitionSpec:
    """Returns the spec of a stored array of this shape. An array that all rows share is
    replicated over the devices that split the rows."""
    wanted = layout.by_row(entries)
    return PartitionSpec(*[None if i == 1 else e for i, e in zip(shape, wanted)])


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


def names_of(entry: Any) -> tuple[str, ...]:
    """Returns the mesh axes in an entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def as_entry(names: tuple[str, ...]) -> Any:
    """Returns the entry of a spec with these mesh axes: the inverse of `names_of`."""
    return None if len(names) == 0 else names[0] if len(names) == 1 else names


def logical_sharding(
    sharding: Sharding | None, layout: Layout, axis: Axis, codes_ndim: int
) -> Sharding | None:
    """Returns the sharding of the array itself, from the sharding of its codes."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = tuple(full_spec(sharding.spec, codes_ndim))
    if layout.panels is None:
        spec = layout.by_row(spec)
    elif (
        layout.panels[0]
        // layout.panel_rows
        % number_of_shards(sharding.mesh, spec[-1])
    ):
        return None  # through panels: neither rows nor columns are split
    else:
        spec = (*spec, None)
    *_, split = spec
    contracted = (split, *[None] * (len(as_tuple(axis)) - 1))
    return NamedSharding(sharding.mesh, PartitionSpec(*logical(spec, axis, contracted)))


def codes_of(stored: Stored) -> Any:
    """Returns the largest stored array: its sharding is the sharding of the array."""
    return max(jtu.tree_leaves(stored), key=lambda a: a.size)


def typed_sharding(stored: Stored, layout: Layout, axis: Axis) -> NamedSharding | None:
    """Returns the sharding of an array, if the types of its stored arrays carry it."""
    sharding = jax.typeof(codes_of(stored)).sharding
    if not sharding.mesh.explicit_axes:
        return None
    ndim = codes_of(stored).ndim
    return cast(NamedSharding, logical_sharding(sharding, layout, axis, ndim))


def placed(a: Any, sharding: NamedSharding) -> Any:
    """Places an array, or a `jax.ShapeDtypeStruct`, with this sharding."""
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    if not isinstance(a, Tracer):
        return jax.device_put(a, sharding)
    if sharding.mesh.explicit_axes:
        return jax.sharding.reshard(a, sharding)
    return jax.lax.with_sharding_constraint(a, sharding)


def vary_together(*operands: Any) -> list[Any]:
    """Marks each operand as varying over every mesh axis that any operand varies over,
    as one function under `shard_map` requires. (The transpose of the mark is the sum
    over shards that the cotangent needs.)"""
    varying = [jax.typeof(a).manual_axis_type.varying for a in operands]
    every = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(sorted(every - axes)), to="varying")
        if every - axes
        else a
        for a, axes in zip(operands, varying)
    ]


def number_of_shards(mesh: Any, entry: Any) -> int:
    """Returns the number of parts into which an entry of a spec splits an axis."""
    return math.prod(mesh.shape[name] for name in names_of(entry))


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
