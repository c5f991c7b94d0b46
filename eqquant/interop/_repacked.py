import dataclasses

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._array import QuantizedArray, relaid
from .._product import as_tuple, full_spec
from ..formats import AbstractFormat


def repacked(
    q: QuantizedArray, format: AbstractFormat, row_axis: int
) -> QuantizedArray:
    """The same array in a format that packs the same codes otherwise, and in another
    layout. Where it is split over devices between bytes that are none in the other
    format, its contracted axes are put together first."""
    sharding = q.placement
    if isinstance(sharding, NamedSharding):
        q = q.with_sharding(whole_along(sharding, q))
    return relaid(q, format, row_axis)


def repacked_struct(
    q: QuantizedArray, format: AbstractFormat, row_axis: int
) -> QuantizedArray:
    """The same, of which only the shapes matter."""
    if (format, row_axis) == (q.format, q.row_axis):
        return q
    stored = jtu.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), q.stored)
    q = dataclasses.replace(q, stored=stored, sharding=None)
    return jax.eval_shape(lambda q: relaid(q, format, row_axis), q)


def whole_along(sharding: NamedSharding, q: QuantizedArray) -> NamedSharding:
    """The same, but that what `q` contracts is not split."""
    spec = list(full_spec(sharding.spec, q.ndim))
    for i in as_tuple(q.axis):
        spec[i] = None
    return sharding.update(spec=PartitionSpec(*spec))
