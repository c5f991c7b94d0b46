import dataclasses

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax

from .._array import (
    axis_from_end,
    blocked_axes,
    is_quantized,
    leading_axes,
    permuted,
    QuantizedArray,
)
from ..formats import AbstractScaled
from ._table import add_rule


# The rule for gathers along one leading axis, which read only the selected entries.
# Rows of a matrix are decoded; weights of a stack stay packed.


@add_rule("gather")
def _gather(interpreter, eqn, values):
    q, indices = values
    params = eqn.params
    numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
    if not is_quantized(q) or numbers.operand_batching_dims:
        return NotImplemented
    # Exactly one axis should be indexed, with slices of size one.
    cut = [i for i in range(q.ndim) if sizes[i] != q.shape[i]]
    cut = cut or [i for i in numbers.collapsed_slice_dims]
    if len(cut) != 1 or cut[0] not in leading_axes(q) or sizes[cut[0]] != 1:
        return NotImplemented
    (axis,) = cut
    fills = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if axis not in numbers.start_index_map:
        return NotImplemented
    if fills and len(numbers.start_index_map) != 1:
        return NotImplemented
    if set(numbers.collapsed_slice_dims) - {axis}:
        return NotImplemented
    ids = indices[..., numbers.start_index_map.index(axis)]
    ids = ids if ids.dtype.itemsize >= 4 else ids.astype(jnp.int32)
    keeps = axis not in numbers.collapsed_slice_dims

    # Taking `ids` along `axis` puts their axes in its place: permute the result to the
    # order of the gather.
    batch = ids.ndim
    rank = batch + q.ndim - (not keeps)
    batch_axes = [i for i in range(rank) if i not in numbers.offset_dims]
    offsets = iter(sorted(numbers.offset_dims))
    axes = []
    for i in range(q.ndim):
        if i == axis:
            axes += batch_axes
        if i != axis or keeps:
            axes.append(next(offsets))
    order = [axes.index(i) for i in range(rank)]
    ids = ids[..., None] if keeps else ids

    if q.ndim == 2 and q.axis in (-1, -2):
        # (With blocks along axis 0, the rows are the columns of `q`.)
        rows = (q if q.axis == -1 else q.mT)[jnp.clip(ids, 0, q.shape[axis] - 1)]
        if q.axis == -2:
            rows = jnp.moveaxis(rows, -1, 0)
        if fills:
            rows = _filled(rows, ids, q, axis, params["fill_value"])
        return [rows.transpose(order)]
    picked = _picked(q, ids, axis, fills, params["fill_value"])
    if picked is None:
        return NotImplemented
    new = permuted(picked, order)
    return NotImplemented if new is None else [new]


def _filled(rows, ids, q, axis, value):
    inside = (ids >= 0) & (ids < q.shape[axis])
    inside = inside[..., None] if axis == 0 else inside[None]
    value = jnp.nan if value is None else value
    return jnp.where(inside, rows, jnp.full_like(rows, value))


def _picked(q: QuantizedArray, ids, axis, fills, value):
    lead, blocked = leading_axes(q), blocked_axes(q)
    index = lead.index(axis)
    if index == len(lead) - 1:
        return None
    if fills and not (
        isinstance(q.format, AbstractScaled) and (value is None or value != value)
    ):
        return None
    size = q.shape[axis]

    def take(a):
        # Scales whose bits are all ones are NaN in every dtype.
        ones = jnp.iinfo(a.dtype).max
        return jnp.take(a, ids, axis=index, mode=mode, fill_value=ones)

    mode = "fill" if fills else "clip"
    ids = jnp.where(ids < 0, size, ids) if fills else ids
    stored = jtu.tree_map(take, q.stored)
    grown = ids.ndim - 1
    axes = [i + grown if i > axis else i for i in blocked]
    return dataclasses.replace(
        q,
        stored=stored,
        sharding=None,
        axis=axis_from_end(axes, q.ndim + grown),
    )
