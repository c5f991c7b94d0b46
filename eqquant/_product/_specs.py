import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..formats import Layout, Stored
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


def by_row_of(spec: PartitionSpec | tuple[Any, ...], axis: Axis) -> tuple[Any, ...]:
    """Converts one entry for each logical axis to one for each of `*b n k`."""
    axes = [len(spec) + i for i in as_tuple(axis)]
    lead = [entry for i, entry in enumerate(spec) if i not in axes]
    return (*lead, spec[axes[0]])


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
