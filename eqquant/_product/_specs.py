import itertools as it
import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..formats import AbstractFormat, Layout, Stored
from ._axes import as_tuple, Axis, logical


def full_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """The spec with an entry for each axis."""
    if len(spec) > ndim:
        raise ValueError(
            f"`sharding` should have at most {ndim} entries, one for each axis. Got "
            f"{spec}."
        )
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)))


def spec_of(sharding: NamedSharding | PartitionSpec) -> PartitionSpec:
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
    """What was declared, of `*b n k`, if it is of a mesh that types do not tell of: its
    own, or that which is set."""
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
    """`fn`, which need not know of the types of sharded arrays. What it gives is placed
    in this way, if it is not `None`."""
    if out_sharding is None:
        return fn
    return jax.sharding.auto_axes(fn, out_sharding=out_sharding)


def place(
    stored: Stored, sharding: NamedSharding, layout: Layout, axis: Axis
) -> Stored:
    """Places the stored arrays of an array that is to be sharded in this way.

    **Raises:**

    A `ValueError` if that would split a block, or a byte.
    """
    shape = layout.shape(stored)
    entries = checked_by_row(sharding, layout.format, shape, axis)

    def place_one(a):
        spec = stored_spec(a.shape, entries, layout)
        return placed(a, NamedSharding(sharding.mesh, spec))

    return jtu.tree_map(place_one, stored)


def checked_by_row(
    sharding: NamedSharding, format: AbstractFormat, shape: Sequence[int], axis: Axis
) -> tuple[Any, ...]:
    """The entries of a spec for the axes `*b n k`, which have this `shape`.

    **Raises:**

    A `ValueError` if parts would not be of the same size, or a block or a byte be cut
    through. It names the nearest specs that are possible.
    """
    *lead, k = shape
    ndim = len(lead) + len(as_tuple(axis))
    spec = full_spec(sharding.spec, ndim)
    reason = _refusal(spec, sharding.mesh, format, lead, k, axis)
    if reason is None:
        return by_row_of(spec, axis)
    fits = lambda spec: _refusal(spec, sharding.mesh, format, lead, k, axis) is None
    others = " or ".join(map(str, nearest_specs(spec, fits)))
    raise ValueError(
        f"{reason}. Shard another axis, or over fewer devices: the nearest to "
        f"`sharding` that would do is {others}. Got {spec}."
    )


def by_row_of(spec: PartitionSpec | tuple[Any, ...], axis: Axis) -> tuple[Any, ...]:
    """From an entry for each logical axis to one for each of `*b n k`."""
    axes = [len(spec) + i for i in as_tuple(axis)]
    lead = [entry for i, entry in enumerate(spec) if i not in axes]
    return (*lead, spec[axes[0]])


def stored_spec(
    shape: Sequence[int], entries: tuple[Any, ...], layout: Layout
) -> PartitionSpec:
    """Of a stored array of this shape. What all rows share is on all devices."""
    wanted = layout.by_row(entries)
    return PartitionSpec(*[None if i == 1 else e for i, e in zip(shape, wanted)])


def _refusal(spec, mesh, format, lead, k, axis):
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
    if not splits_evenly(format, lead, k, shards):
        return (
            f"Splitting {k} contracted positions in {shards} would cut through a block "
            f"or a byte of {format}"
        )
    return None


def nearest_specs(
    spec: PartitionSpec, fits: Callable[[PartitionSpec], bool]
) -> list[PartitionSpec]:
    """Specs that fit, at most three, the nearest to one that does not first: with some
    names on another axis, or with fewer of them."""

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
    """The names in an entry of a spec."""
    if entry is None or entry is PartitionSpec.UNCONSTRAINED:
        return ()
    return entry if isinstance(entry, tuple) else (entry,)


def as_entry(names: tuple[str, ...]) -> Any:
    """The inverse."""
    return None if len(names) == 0 else names[0] if len(names) == 1 else names


def logical_sharding(
    sharding: Sharding | None, layout: Layout, axis: Axis, codes_ndim: int
) -> Sharding | None:
    """How the array itself is placed, from how its codes are."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = layout.by_row(tuple(full_spec(sharding.spec, codes_ndim)))
    *_, split = spec
    contracted = (split, *[None] * (len(as_tuple(axis)) - 1))
    return NamedSharding(sharding.mesh, PartitionSpec(*logical(spec, axis, contracted)))


def codes_of(stored: Stored) -> Any:
    """The largest stored array, which is placed as the array itself is."""
    return max(jtu.tree_leaves(stored), key=lambda a: a.size)


def typed_sharding(stored: Stored, layout: Layout, axis: Axis) -> NamedSharding | None:
    """How an array is placed, if the types of its stored arrays tell."""
    sharding = jax.typeof(codes_of(stored)).sharding
    if not sharding.mesh.explicit_axes:
        return None
    ndim = codes_of(stored).ndim
    return cast(NamedSharding, logical_sharding(sharding, layout, axis, ndim))


def placed(a: Any, sharding: NamedSharding) -> Any:
    """An array, or a struct of one, in this place."""
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    if not isinstance(a, Tracer):
        return jax.device_put(a, sharding)
    if sharding.mesh.explicit_axes:
        return jax.sharding.reshard(a, sharding)
    return jax.lax.with_sharding_constraint(a, sharding)


def vary_together(*operands: Any) -> list[Any]:
    """Arrays of which each varies over the devices that any of them does, as operands
    of one function must under `shard_map`. (The transpose of making one vary is the sum
    over shards that its cotangent needs.)"""
    varying = [jax.typeof(a).manual_axis_type.varying for a in operands]
    every = frozenset().union(*varying)
    return [
        jax.lax.pcast(a, tuple(sorted(every - axes)), to="varying")
        if every - axes
        else a
        for a, axes in zip(operands, varying)
    ]


def number_of_shards(mesh: Any, entry: Any) -> int:
    """Over how many devices an axis with this entry of a spec is split."""
    return math.prod(mesh.shape[name] for name in names_of(entry))


def splits_evenly(
    format: AbstractFormat, lead: Sequence[int], k: int, shards: int
) -> bool:
    """Whether each shard of `k` contracted positions ends with a block and a byte."""
    if shards == 1:
        return True
    if k % shards != 0 or not format.splits:
        return False

    # One position more would begin another unit in each stored array that is split.

    def sizes(k):
        w = jax.ShapeDtypeStruct((*lead, k), jnp.float32)
        return [a.shape[-1] for a in jtu.tree_leaves(jax.eval_shape(format.encode, w))]

    return all(
        whole == 1 or after > before
        for whole, before, after in zip(
            sizes(k), sizes(k // shards), sizes(k // shards + 1)
        )
    )
