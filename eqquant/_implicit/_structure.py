import dataclasses
import math
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from .._array import (
    AbstractArrayLike,
    along,
    axis_from_end,
    blocked_axes,
    broadcast_leading,
    is_apart,
    is_quantized,
    leading_axes,
    permuted,
    QuantizedArray,
    reshaped_leading,
    side_by_side,
    take_along,
)
from ._gather import gathered
from ._interpreter import bind
from ._moves import (
    Broadcast,
    DynamicSlice,
    Gather,
    joining,
    moves_of,
    moving,
    Reshape,
    Slice,
    Transpose,
)
from ._table import add_rule


# Rules for operations that only move numbers, under which arrays stay packed. (A single
# row, which has no leading axes left, is decoded.)


@add_rule("copy", "name", "optimization_barrier", "pvary", passes_all=True)
def _identity(interpreter, eqn, values):
    del interpreter
    leaves, treedef = jtu.tree_flatten(list(values))
    if not eqn.primitive.multiple_results:
        leaves = [bind(eqn, [leaf])[0] for leaf in leaves]
    else:
        leaves = bind(eqn, leaves)
    return jtu.tree_unflatten(treedef, leaves)


@add_rule("stop_gradient")
def _stop_gradient(interpreter, eqn, values):
    return values  # No gradient reaches a quantized array anyway.


@add_rule(
    "convert_element_type",
    of=AbstractArrayLike,
    takes="new_dtype weak_type",
    sharding=None,
)
def _convert(interpreter, eqn, values):
    (x,) = values
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        return NotImplemented
    if jnp.finfo(dtype).bits < 16:
        return NotImplemented  # The purpose of such a cast is its rounding.
    return [x.astype(dtype)]


def _move(interpreter, eqn, values):
    q, *others = values
    if not is_quantized(q) or any(map(is_quantized, others)):
        return NotImplemented
    found = [
        None if moves is None else _moved(q, moves)
        for moves in moves_of(eqn, 0, values)
    ]
    return NotImplemented if any(new is None for new in found) else found


_where: dict[str, Any] = {"sharding": None}
for _name, _moving in moving.items():
    add_rule(_name, **(_moving.parameters | _where))(_move)


def _moved(q, moves):
    for move in moves:
        q = _rules[type(move)](q, move)
        if q is None:
            break
    return q


def _transpose(q, move):
    # (A gathered array may be dense.)
    return permuted(q, move.order) if is_quantized(q) else q.transpose(move.order)


def _reshape(q, move):
    shape = move.shape
    if shape == q.shape:
        return q
    blocked = blocked_axes(q)
    start, stop = blocked[0], blocked[-1] + 1
    before, inside = math.prod(q.shape[:start]), math.prod(q.shape[start:stop])
    if stop - start != len(blocked) or q.size == 0:
        return None
    # The blocked axes must keep the number of elements before them and among them.
    # Neighbouring axes of size one become leading axes where possible.
    ends = np.cumprod([1, *shape])
    starts = np.flatnonzero(ends == before)
    stops = np.flatnonzero(ends == before * inside)
    if len(starts) == 0 or len(stops) == 0 or starts[-1] >= stops[-1]:
        return None
    start = int(starts[-1])
    stop = int(stops[stops > start][0])
    lead = (*shape[:start], *shape[stop:])
    if len(lead) == 0:
        return q.dequantize().reshape(shape)
    if not _may_be_rows(q, lead[-1]):
        return None
    new = reshaped_leading(q, lead)
    axis = axis_from_end(range(start, stop), len(shape))
    return dataclasses.replace(new, axis=axis, inner=shape[start + 1 : stop])


def _may_be_rows(q, size):
    # Rows that are stored together stay the last leading axis.
    lead = leading_axes(q)
    return q.format.rows_together == 1 or size == q.shape[lead[-1]]


def _broadcast(q, move):
    shape, dims = move
    blocked = blocked_axes(q)
    if any(shape[dims[i]] != q.shape[i] for i in blocked):
        return None
    if q.ndim == 1 and math.prod(shape) != q.size:
        return None  # repeats a vector, which has no leading axes
    axes = [dims[i] for i in blocked]
    lead = [i for i in range(len(shape)) if i not in axes]
    places = tuple(lead.index(dims[i]) for i in leading_axes(q))
    if places[-1:] != (len(lead) - 1,) and q.format.rows_together > 1:
        return None
    new = broadcast_leading(q, tuple(shape[i] for i in lead), places)
    return dataclasses.replace(new, axis=axis_from_end(axes, len(shape)))


def _slice(q, move):
    axis, start, size, step = move
    if not is_apart(q, axis):
        return None
    stop = start + (size - 1) * step + 1 if size > 0 else start
    return along(q, axis, lambda a, i: lax.slice_in_dim(a, start, stop, step, i))


def _dynamic_slice(q, move):
    axis, start, size = move
    return take_along(q, axis, start, size) if is_apart(q, axis) else None


_rules = {
    Broadcast: _broadcast,
    DynamicSlice: _dynamic_slice,
    Gather: gathered,
    Reshape: _reshape,
    Slice: _slice,
    Transpose: _transpose,
}


def _join(interpreter, eqn, values):
    if not all(map(is_quantized, values)) or values[0].ndim == 1:
        return NotImplemented
    moves = joining[eqn.primitive.name].moves
    each = [moves(eqn, i) for i in range(len(values))]
    parts = [_moved(q, before) for q, (*before, _) in zip(values, each, strict=True)]
    if any(part is None for part in parts):
        return NotImplemented
    *_, join = each[0]
    return concatenated(parts, join.axis)


for _name, _joining in joining.items():
    add_rule(_name, **_joining.parameters)(_join)


def concatenated(values, axis):
    first, *rest = values
    if not is_apart(first, axis):
        return NotImplemented
    if any(_kind(q) != _kind(first) for q in rest):
        return NotImplemented
    index = leading_axes(first).index(axis)
    wholes = [_with_all_rows(side_by_side(q)) for q in values]
    first, *_ = wholes
    rank = len(leading_axes(first))
    place = index if index < rank - 1 else rank + 1 + first.layout.row_axis
    stored = jtu.tree_map(
        lambda *leaves: lax.concatenate(leaves, place), *[q.stored for q in wholes]
    )
    return [dataclasses.replace(first, stored=stored, sharding=None)]


def _kind(q):
    return q.layout, q.axis, q.activation, q.dtype, q.inner, q.writable


def _with_all_rows(q: QuantizedArray) -> QuantizedArray:
    # Repeats the stored arrays that all rows share, once for each row.
    *lead, _ = q.layout.shape(q.stored)

    def spread(a):
        shape = list(a.shape)
        shape[q.layout.row_axis] = lead[-1]
        return jnp.broadcast_to(a, shape)

    return dataclasses.replace(q, stored=jtu.tree_map(spread, q.stored))
