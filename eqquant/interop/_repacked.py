import dataclasses

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._array import QuantizedArray, relaid
from .._product import as_tuple, full_spec
from ..formats import Layout


def repacked(q: QuantizedArray, layout: Layout) -> QuantizedArray:
    """The same array in another layout, whose format may pack the same codes otherwise.
    Contracted axes that are split over devices are put together first: the other format
    may not have bytes that end where they are split."""
    sharding = q.placement
    if isinstance(sharding, NamedSharding):
        q = q.with_sharding(whole_along(sharding, q))
    return relaid(q, layout)


def repacked_struct(q: QuantizedArray, layout: Layout) -> QuantizedArray:
    """The same, of which only the shapes matter."""
    if layout == q.layout:
        return q
    stored = jtu.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), q.stored)
    q = dataclasses.replace(q, stored=stored, sharding=None)
    return jax.eval_shape(lambda q: relaid(q, layout), q)


def whole_along(sharding: NamedSharding, q: QuantizedArray) -> NamedSharding:
    """The same, but that what `q` contracts is not split."""
    spec = list(full_spec(sharding.spec, q.ndim))
    for i in as_tuple(q.axis):
        spec[i] = None
    return sharding.update(spec=PartitionSpec(*spec))
