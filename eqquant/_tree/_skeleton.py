import dataclasses

import jax
from jax.sharding import NamedSharding

from .._array import quantize, QuantizedArray
from .._product import Axis, full_spec
from ..formats import AbstractFormat


def skeleton(
    leaf: jax.ShapeDtypeStruct, format: AbstractFormat, axis: Axis
) -> QuantizedArray:
    """Returns the quantized form of a leaf of this shape, with structs in place of
    stored arrays."""
    q = jax.eval_shape(lambda w: quantize(w, format, axis=axis), leaf)
    if not isinstance(leaf.sharding, NamedSharding):
        return q
    # A struct has nothing to place, so its sharding is only declared.
    spec = full_spec(leaf.sharding.spec, q.ndim)
    return dataclasses.replace(q, sharding=leaf.sharding.update(spec=spec))
