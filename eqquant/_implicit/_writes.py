import dataclasses
import functools as ft
from collections.abc import Sequence
from typing import Any

import jax
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array

from .._array import (
    axis_from_end,
    blocked_axes,
    is_quantized,
    leading_axes,
    quantize,
    QuantizedArray,
    undeclared,
)
from ..formats import AbstractFormat, Stored
from ._structure import concatenated
from ._table import add_rule


# Rules for writing ordinary numbers into a quantized array that is `writable`: they are
# rounded to its format, and replace the previous codes and scales. So whole blocks have
# to be written: every index of the axes along which blocks lie.


@add_rule("dynamic_update_slice")
def _dynamic_update_slice(interpreter, eqn, values):
    q, new, *starts = values
    if not _is_writable(q):
        return NotImplemented
    new = interpreter.dequantize(new, eqn)
    blocked = blocked_axes(q)
    if any(new.shape[i] != q.shape[i] for i in blocked):
        return NotImplemented
    rows = _encoded(new, q, blocked)
    if rows is None:
        return NotImplemented
    lead = [starts[i] for i in leading_axes(q)]
    at = q.layout.by_row((*lead, lax.full_like(starts[0], 0)))

    def write(a, b):
        return lax.dynamic_update_slice(a, b, at, allow_negative_indices=False)

    new = q.layout.from_rows(rows)
    return [undeclared(q, stored=jtu.tree_map(write, q.stored, new))]


# (`update_jaxpr` belongs to `.at[].apply`, which gets no numbers to write.)
@add_rule(
    "scatter",
    takes="dimension_numbers indices_are_sorted unique_indices mode",
    update_jaxpr=None,
    update_consts=(),
)
def _scatter(interpreter, eqn, values):
    q, indices, new = values
    params = eqn.params
    numbers = params["dimension_numbers"]
    if not _is_writable(q) or is_quantized(indices):
        return NotImplemented
    new = interpreter.dequantize(new, eqn)
    blocked, batch = blocked_axes(q), numbers.operand_batching_dims
    window = [
        i
        for i in range(q.ndim)
        if i not in numbers.inserted_window_dims and i not in batch
    ]
    # (Batching makes NumPy's integers.)
    places = dict(zip(window, map(int, numbers.update_window_dims), strict=True))
    if any(i not in places or new.shape[places[i]] != q.shape[i] for i in blocked):
        return NotImplemented
    # An index of a whole axis has to be zero. Other indices are clipped to zero, or
    # dropped.
    indexed = numbers.scatter_dims_to_operand_dims
    columns = [j for j, i in enumerate(indexed) if i not in blocked]
    drops = params["mode"] == lax.GatherScatterMode.FILL_OR_DROP
    if drops and len(columns) < len(indexed):
        return NotImplemented
    rows = _encoded(new, q, [places[i] for i in blocked])
    if rows is None:
        return NotImplemented

    # The places of the axes of the array, and of the update, in the stored arrays.
    lead = leading_axes(q)
    order = q.layout.by_row((*range(len(lead) + 1),))
    stored_at = {i: order.index(j) for j, i in enumerate(lead)}
    others = [i for i in range(new.ndim) if i not in [places[i] for i in blocked]]
    across = [i for i in others if i not in places.values()]
    inside = [i for i in window if i not in blocked]
    into = [(stored_at[i], others.index(places[i])) for i in inside]
    into = sorted([*into, (order.index(len(lead)), len(others))])
    permutation = [*map(others.index, across), *(i for _, i in into)]
    mapped = lambda axes: tuple(stored_at[i] for i in axes)
    new_numbers = lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(len(across), len(permutation))),
        inserted_window_dims=mapped(numbers.inserted_window_dims),
        scatter_dims_to_operand_dims=mapped(indexed[j] for j in columns),
        operand_batching_dims=mapped(batch),
        scatter_indices_batching_dims=numbers.scatter_indices_batching_dims,
    )

    def write(a, b):
        return lax.scatter(
            a,
            indices[..., columns],
            lax.transpose(b, permutation),
            new_numbers,
            indices_are_sorted=params["indices_are_sorted"],
            unique_indices=params["unique_indices"],
            mode=params["mode"],
        )

    return [undeclared(q, stored=jtu.tree_map(write, q.stored, rows))]


@add_rule("concatenate", takes="dimension")
def _append(interpreter, eqn, values):
    axis = eqn.params["dimension"]
    likes = [x for x in values if _is_writable(x)]
    if not likes or all(map(is_quantized, values)):
        return NotImplemented
    q = likes[0]
    if axis not in leading_axes(q):
        return NotImplemented
    parts = []
    for x in values:
        if not is_quantized(x):
            rows = _encoded(x, q, blocked_axes(q))
            if rows is None:
                return NotImplemented
            x = dataclasses.replace(q, stored=q.layout.from_rows(rows), sharding=None)
        parts.append(x)
    return concatenated(parts, axis)


def _is_writable(x: Any) -> bool:
    return isinstance(x, QuantizedArray) and x.writable


def _encoded(new: Array, q: QuantizedArray, axes: Sequence[int]) -> Stored | None:
    """Encodes numbers in the format of `q`, in rows, with blocks along these axes.
    `None` if rows of `q` share stored numbers, which cannot change for some rows
    alone."""
    *lead, _ = q.layout.shape(q.stored)
    shapes = [a.shape[:-1] for a in jtu.tree_leaves(q.layout.to_rows(q.stored))]
    if any(shape != tuple(lead) for shape in shapes):
        return None
    found = _quantize(new, q.format, axis_from_end(axes, new.ndim))
    return found.layout.to_rows(found.stored)


# Traced, so that numbers that are not finite become NaN instead of an error.
@ft.partial(jax.jit, static_argnums=(1, 2))
def _quantize(new: Array, format: AbstractFormat, axis: Any) -> QuantizedArray:
    return quantize(new, format, axis=axis)
