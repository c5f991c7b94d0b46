import dataclasses
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array

from .._array import (
    axis_from_end,
    blocked_axes,
    is_apart,
    leading_axes,
    QuantizedArray,
)
from ..formats import AbstractScaled, or_nan
from ._moves import Gather


def gathered(q: QuantizedArray, move: Gather) -> QuantizedArray | Array | None:
    """Returns the selected entries of a leading axis, and reads no others. Rows of a
    matrix are decoded; matrices of a stack stay packed. `None` if neither is
    possible."""
    axis, size = move.axis, q.shape[move.axis]
    fills = move.mode == lax.GatherScatterMode.FILL_OR_DROP
    if not is_apart(q, axis) or (fills and move.indices.shape[-1] != 1):
        return None
    ids = move.indices[..., move.column].reshape(move.shape)
    ids = ids if ids.dtype.itemsize >= 4 else ids.astype(jnp.int32)
    if q.ndim != 2 or q.axis not in (-1, -2):
        return _picked(q, ids, axis, fills, move.fill_value)
    # (With blocks along axis 0, the rows are the columns of `q`.)
    rows: Any = (q if q.axis == -1 else q.mT)[jnp.clip(ids, 0, size - 1)]
    if q.axis == -2:
        rows = jnp.moveaxis(rows, -1, 0)
    return _filled(rows, ids, q, axis, move.fill_value) if fills else rows


def _filled(rows, ids, q, axis, value):
    inside = (ids >= 0) & (ids < q.shape[axis])
    inside = inside[..., None] if axis == 0 else inside[None]
    if value is None or value != value:
        return or_nan(inside, rows)
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
