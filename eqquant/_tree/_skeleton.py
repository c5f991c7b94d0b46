import dataclasses
from collections.abc import Sequence

import equinox as eqx
import jax
from jax.sharding import NamedSharding

from .._array import quantize, QuantizedArray
from .._product import Axis, full_spec
from ..formats import AbstractFormat
from ._decide import Decision


def skeleton(
    leaf: jax.ShapeDtypeStruct, format: AbstractFormat, axis: Axis
) -> QuantizedArray:
    """What a leaf of this shape becomes, with structs in place of stored arrays."""
    q = jax.eval_shape(lambda w: quantize(w, format, axis=axis), leaf)
    if not isinstance(leaf.sharding, NamedSharding):
        return q
    # A struct has nothing to place, so its sharding is only declared.
    spec = full_spec(leaf.sharding.spec, q.ndim)
    return dataclasses.replace(q, sharding=leaf.sharding.update(spec=spec))


def skeletons(
    decisions: Sequence[Decision],
) -> dict[int, tuple[QuantizedArray, str, tuple[eqx.Module, ...]]]:
    """By the number of each leaf that is to be quantized: the skeleton that takes its
    place, its path, and the modules around it."""
    found = {}
    for i, decision in enumerate(decisions):
        leaf, info = decision.leaf, decision.info
        if info is not None and decision.format is not None:
            struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
            q = skeleton(struct, decision.format, info.axis)
            found[i] = q, info.path, info.ancestors
    return found
