import dataclasses
from typing import Any

import jax
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec

from .._array import (
    AbstractArrayLike,
    blocked_axes,
    is_quantized,
    leading_axes,
    QuantizedArray,
    side_by_side,
)
from .._product import full_spec, number_of_shards, splits_evenly
from ._interpreter import as_arrays
from ._table import add_rule, is_operand


# Rules for sharding: stored arrays are split like the array, unless that would cut
# through a block or a byte.


@add_rule(
    "sharding_constraint", takes="sharding context_mesh unconstrained_dims", layout=None
)
def _constraint(interpreter, eqn, values):
    (q,) = values
    sharding = eqn.params["sharding"]
    if not isinstance(sharding, NamedSharding) or eqn.params["unconstrained_dims"]:
        return NotImplemented
    if _specs(q, sharding.spec, sharding.mesh) is None:
        return NotImplemented
    return [q.with_sharding(sharding)]


@add_rule(
    "shard_map",
    of=AbstractArrayLike,
    takes="jaxpr mesh in_specs out_specs check_vma newly_manual_axes",
)
def _shard_map(interpreter, eqn, values):
    params = eqn.params
    values = as_arrays(eqn, values)
    operands, in_specs = [], []
    for value, spec in zip(values, params["in_specs"], strict=True):
        if is_quantized(value):
            value = side_by_side(value)
            specs = _specs(value, spec, params["mesh"])
            if specs is None:
                value = interpreter.dequantize(value, eqn)
            else:
                value = dataclasses.replace(value, sharding=None)
                spec = dataclasses.replace(value, stored=specs)
        elif is_operand(value):
            # (A single stored array has the spec of the array itself.)
            value = value.without_blocks()
            if len(jtu.tree_leaves(value)) > 1:
                value = interpreter.dequantize(value, eqn)
        operands.append(value)
        in_specs.append(spec)

    def call(*new):
        return interpreter.nested(eqn, params["jaxpr"], new)

    fn = jax.shard_map(
        call,
        mesh=params["mesh"],
        in_specs=tuple(in_specs),
        out_specs=list(params["out_specs"]),
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    return fn(*operands)


def _specs(q: QuantizedArray, spec: PartitionSpec, mesh: Any) -> Any:
    """Returns the spec of each stored array, or `None` if `spec` cuts blocks or
    bytes."""
    entries = tuple(full_spec(spec, q.ndim))
    first, *others = blocked_axes(q)
    *lead, k = q.layout.shape(q.stored)
    shards = number_of_shards(mesh, entries[first])
    if any(entries[i] is not None for i in others):
        return None
    if not splits_evenly(q.format, lead, k, shards):
        return None
    rows = [entries[i] for i in leading_axes(q)]
    wanted = q.layout.by_row((*rows, entries[first]))

    def of(a):
        split = [None if size == 1 else e for size, e in zip(a.shape, wanted)]
        return PartitionSpec(*split)

    return jtu.tree_map(of, q.stored)
