from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding, PartitionSpec

from ..formats import Layout, Stored
from ._axes import Axis
from ._splits import checked_by_row


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


def stored_spec(
    shape: Sequence[int], entries: tuple[Any, ...], layout: Layout
) -> PartitionSpec:
    """Returns the spec of a stored array of this shape. An array that all rows share is
    replicated over the devices that split the rows."""
    wanted = layout.by_row(entries)
    return PartitionSpec(*[None if i == 1 else e for i, e in zip(shape, wanted)])


def placed(a: Any, sharding: NamedSharding) -> Any:
    """Places an array, or a `jax.ShapeDtypeStruct`, with this sharding."""
    if isinstance(a, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)
    if not isinstance(a, Tracer):
        return jax.device_put(a, sharding)
    if sharding.mesh.explicit_axes:
        return jax.sharding.reshard(a, sharding)
    return jax.lax.with_sharding_constraint(a, sharding)
