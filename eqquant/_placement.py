import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array

from ._axes import as_tuple, Axis, logical
from .formats import AbstractFormat, by_row, shape_of, Stored


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


def place(
    stored: Stored,
    sharding: NamedSharding,
    format: AbstractFormat,
    axis: Axis,
    tail: int,
    row_axis: int,
) -> Stored:
    """Places the stored arrays of an array that is to be sharded in this way.

    **Raises:**

    A `ValueError` if that would split a block, or a byte.
    """
    *lead, k = shape_of(format, stored, tail, row_axis)
    axes = as_tuple(axis)
    ndim = len(lead) + len(axes)
    spec = full_spec(sharding.spec, ndim)
    if any(spec[ndim + i] is not None for i in axes[1:]):
        raise ValueError(
            f"Of the contracted axes {axis}, only the first can be split. Got {spec}."
        )
    split = spec[ndim + axes[0]]
    shards = number_of_shards(sharding.mesh, split)
    if not splits_evenly(format, lead, k, shards):
        raise ValueError(
            f"Splitting {k} contracted positions in {shards} would cut through a block "
            f"or a byte of {format}. Shard another axis, or over fewer devices. Got "
            f"{spec}."
        )
    others = [spec[i] for i in range(ndim) if i - ndim not in axes]

    wanted = by_row((*others, split), row_axis)

    def place_one(a):
        entries = [None if size == 1 else entry for size, entry in zip(a.shape, wanted)]
        return _place(a, NamedSharding(sharding.mesh, PartitionSpec(*entries)))

    return jtu.tree_map(place_one, stored)


def logical_sharding(
    sharding: Sharding, axis: Axis, row_axis: int, codes_ndim: int
) -> Sharding:
    """How the array itself is placed, from how its codes are."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    spec = by_row(tuple(full_spec(sharding.spec, codes_ndim)), row_axis)
    *_, split = spec
    contracted = (split, *[None] * (len(as_tuple(axis)) - 1))
    return NamedSharding(sharding.mesh, PartitionSpec(*logical(spec, axis, contracted)))


def _place(a: Array, sharding: NamedSharding) -> Array:
    if not isinstance(a, Tracer):
        return jax.device_put(a, sharding)
    if sharding.mesh.explicit_axes:
        return jax.sharding.reshard(a, sharding)
    return jax.lax.with_sharding_constraint(a, sharding)


def number_of_shards(mesh: Any, entry: Any) -> int:
    """Over how many devices an axis with this entry of a spec is split."""
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    return math.prod(mesh.shape[name] for name in names)


def splits_evenly(
    format: AbstractFormat, lead: Sequence[int], k: int, shards: int
) -> bool:
    """Whether each shard of `k` contracted positions ends with a block and a byte."""
    if shards == 1:
        return True
    if k % shards != 0:
        return False

    # One position more would begin another unit in each stored array that is split.

    def sizes(k):
        w = jax.ShapeDtypeStruct((*lead, k), jnp.float32)
        return [a.shape[-1] for a in jtu.tree_leaves(jax.eval_shape(format.encode, w))]

    return all(
        whole == 1 or after == before + 1
        for whole, before, after in zip(
            sizes(k), sizes(k // shards), sizes(k // shards + 1)
        )
    )
