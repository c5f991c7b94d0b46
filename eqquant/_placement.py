from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ._axes import as_tuple, Axis, logical
from .formats import AbstractFormat, Stored


def full_spec(spec: PartitionSpec, ndim: int) -> PartitionSpec:
    """The spec with an entry for each axis."""
    if len(spec) > ndim:
        raise ValueError(
            f"`sharding` should have at most {ndim} entries, one for each axis. Got "
            f"{spec}."
        )
    return PartitionSpec(*spec, *[None] * (ndim - len(spec)))


def stored_shardings(
    stored: Stored,
    sharding: NamedSharding,
    format: AbstractFormat,
    axis: Axis,
    tail: int,
) -> Stored:
    """How each stored array is to be placed, from how the array itself is to be.

    **Raises:**

    A `ValueError` if that would split a block, or a byte.
    """
    *lead, k = format.shape(stored, tail)
    ndim = len(lead) + len(as_tuple(axis))
    spec = full_spec(sharding.spec, ndim)
    first, *inner = as_tuple(axis)
    if any(spec[ndim + i] is not None for i in inner):
        raise ValueError(
            f"Of the contracted axes {axis}, only the first can be split. Got {spec}."
        )
    split = spec[ndim + first]
    shards = _number(sharding.mesh, split)
    if k % shards != 0 or not _ends_on_a_block(format, lead, k // shards, shards):
        raise ValueError(
            f"Splitting {k} contracted positions in {shards} would cut through a block "
            f"or a byte of {format}. Shard another axis, or over fewer devices. Got "
            f"{spec}."
        )
    others = [spec[i] for i in range(ndim) if i - ndim not in as_tuple(axis)]

    def place(a):
        entries = [
            None if size == 1 else entry
            for size, entry in zip(a.shape, [*others, split])
        ]
        return NamedSharding(sharding.mesh, PartitionSpec(*entries))

    return jtu.tree_map(place, stored)


def logical_sharding(sharding: Sharding, axis: Axis, codes_ndim: int) -> Sharding:
    """How the array itself is placed, from how its codes are."""
    if not isinstance(sharding, NamedSharding):
        return sharding
    *_, split = spec = tuple(full_spec(sharding.spec, codes_ndim))
    contracted = (split, *[None] * (len(as_tuple(axis)) - 1))
    return NamedSharding(sharding.mesh, PartitionSpec(*logical(spec, axis, contracted)))


def _number(mesh: Any, entry: Any) -> int:
    names = () if entry is None else entry if isinstance(entry, tuple) else (entry,)
    number = 1
    for name in names:
        number *= mesh.shape[name]
    return number


def _ends_on_a_block(format, lead, k, shards):
    # It does if one position more would begin another unit of each array that is split.
    if shards == 1:
        return True

    def sizes(k):
        w = jax.ShapeDtypeStruct((*lead, k), jnp.float32)
        return [a.shape[-1] for a in jtu.tree_leaves(jax.eval_shape(format.encode, w))]

    whole = sizes(k * shards)
    return all(
        size == 1 or after == before + 1
        for size, before, after in zip(whole, sizes(k), sizes(k + 1))
    )
