from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import ClosedJaxpr

from .._array import is_quantized
from ._interpreter import Value
from ._table import is_operand


def trace(fn: Callable[..., Any], values: Sequence[Value]) -> ClosedJaxpr:
    """Returns the jaxpr of a function, traced with dense arrays in place of quantized
    `values`."""
    return jax.make_jaxpr(fn)(*[as_operand(value) for value in values])


def as_operand(value: Value) -> Any:
    """Returns the abstract dense array that stands for a quantized one in a trace;
    other values are returned unchanged."""
    if not is_operand(value):
        return value
    if not is_quantized(value):
        return as_operand(value._held)
    first, *_ = jtu.tree_leaves(value.stored)
    aval = jax.typeof(first)
    if aval.manual_axis_type.varying:
        # Under `shard_map`, only an actual array can vary over mesh axes. Tracing does
        # not read its numbers.
        return lax.full_like(first, 0, value.dtype, value.shape)
    explicit = aval.sharding.mesh.explicit_axes
    return jax.ShapeDtypeStruct(
        value.shape, value.dtype, sharding=value.placement if explicit else None
    )
