import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from .._array import quantize, QuantizedArray
from .._product import Axis, full_spec
from ..formats import AbstractFormat
from ._decision import Decision


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


def skeletons(decisions: Sequence[Decision]) -> list[Any]:
    """Returns the skeleton of each leaf to quantize, and the other leaves unchanged."""
    found = []
    for decision in decisions:
        leaf, info = decision.leaf, decision.info
        if info is not None and decision.format is not None:
            struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            leaf = skeleton(struct, decision.format, info.axis)
        found.append(leaf)
    return found
