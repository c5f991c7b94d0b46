import dataclasses
import math

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax

from .._array import (
    along,
    axis_from_end,
    blocked_axes,
    broadcast_leading,
    is_quantized,
    leading_axes,
    permuted,
    QuantizedArray,
    reshaped_leading,
    take_along,
)
from ._interpreter import bind
from ._table import add_rule


# Rules for operations that only move numbers, under which arrays stay packed. (A single
# row, which has no leading axes left, is decoded.)


@add_rule("copy", "copy_p", "name", "optimization_barrier", "pcast", "pvary")
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


@add_rule("convert_element_type")
def _convert(interpreter, eqn, values):
    (q,) = values
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating) or eqn.params["sharding"] is not None:
        return NotImplemented
    if jnp.finfo(dtype).bits < 16:
        return NotImplemented  # The purpose of such a cast is its rounding.
    return [q.astype(dtype)]


@add_rule("transpose")
def _transpose(interpreter, eqn, values):
    (q,) = values
    new = permuted(q, eqn.params["permutation"])
    return NotImplemented if new is None else [new]


@add_rule("reshape")
def _reshape(interpreter, eqn, values):
    q, *sizes = values
    params = eqn.params
    if sizes or params["dimensions"] is not None or params["sharding"] is not None:
        return NotImplemented
    return _reshaped(q, eqn.params["new_sizes"])


@add_rule("squeeze")
def _squeeze(interpreter, eqn, values):
    (q,) = values
    return _reshaped(q, eqn.outvars[0].aval.shape)


def _reshaped(q, shape):
    if tuple(shape) == q.shape:
        return [q]
    blocked = blocked_axes(q)
    start, stop = blocked[0], blocked[-1] + 1
    before, inside = math.prod(q.shape[:start]), math.prod(q.shape[start:stop])
    if stop - start != len(blocked) or q.size == 0:
        return NotImplemented
    # The blocked axes must keep the number of elements before them and among them. Axes
    # of size one next to them become leading axes where possible.
    ends = np.cumprod([1, *shape])
    starts = np.flatnonzero(ends == before)
    stops = np.flatnonzero(ends == before * inside)
    if len(starts) == 0 or len(stops) == 0 or starts[-1] >= stops[-1]:
        return NotImplemented
    start = int(starts[-1])
    stop = int(stops[stops > start][0])
    lead = (*shape[:start], *shape[stop:])
    if len(lead) == 0:
        return [q.dequantize().reshape(shape)]
    new = reshaped_leading(q, lead)
    axis = axis_from_end(range(start, stop), len(shape))
    inner = tuple(shape[start + 1 : stop])
    return [dataclasses.replace(new, axis=axis, inner=inner)]


@add_rule("broadcast_in_dim")
def _broadcast(interpreter, eqn, values):
    q, *sizes = values
    shape = eqn.params["shape"]
    dims = [int(i) for i in eqn.params["broadcast_dimensions"]]  # may be NumPy's
    blocked = blocked_axes(q)
    if sizes or eqn.params["sharding"] is not None:
        return NotImplemented
    if any(shape[dims[i]] != q.shape[i] for i in blocked):
        return NotImplemented
    if q.ndim == 1 and math.prod(shape) != q.size:
        return NotImplemented  # repeats a vector, which has no leading axes
    axes = [dims[i] for i in blocked]
    lead = [i for i in range(len(shape)) if i not in axes]
    places = tuple(lead.index(dims[i]) for i in leading_axes(q))
    new = broadcast_leading(q, tuple(shape[i] for i in lead), places)
    return [dataclasses.replace(new, axis=axis_from_end(axes, len(shape)))]


@add_rule("slice")
def _slice(interpreter, eqn, values):
    (q,) = values
    strides = eqn.params["strides"] or (1,) * q.ndim
    start, limit = eqn.params["start_indices"], eqn.params["limit_indices"]
    for i in range(q.ndim):
        if (start[i], limit[i], strides[i]) == (0, q.shape[i], 1):
            continue
        if i not in leading_axes(q):
            return NotImplemented
        cut = lambda a, axis, i=i: lax.slice_in_dim(
            a, start[i], limit[i], strides[i], axis
        )
        q = along(q, i, cut)
    return [q]


@add_rule("dynamic_slice")
def _dynamic_slice(interpreter, eqn, values):
    q, *starts = values
    sizes = eqn.params["slice_sizes"]
    if not is_quantized(q) or len(starts) != q.ndim:
        return NotImplemented
    for i in range(q.ndim):
        if sizes[i] == q.shape[i]:
            continue
        if i not in leading_axes(q):
            return NotImplemented
        q = take_along(q, i, starts[i], sizes[i])
    return [q]


@add_rule("split")
def _split(interpreter, eqn, values):
    (q,) = values
    axis, sizes = eqn.params["axis"], eqn.params["sizes"]
    if axis not in leading_axes(q):
        return NotImplemented
    stops = np.cumsum(sizes).tolist()
    return [take_along(q, axis, i - int(n), int(n)) for i, n in zip(stops, sizes)]


@add_rule("unstack")
def _unstack(interpreter, eqn, values):
    (q,) = values
    axis = eqn.params["axis"]
    if axis not in leading_axes(q):
        return NotImplemented
    shape = q.shape[:axis] + q.shape[axis + 1 :]
    outs = [_reshaped(take_along(q, axis, i, 1), shape) for i in range(q.shape[axis])]
    return NotImplemented if NotImplemented in outs else [out for (out,) in outs]


@add_rule("stack")
def _stack(interpreter, eqn, values):
    axis, shape = eqn.params["axis"], list(eqn.outvars[0].aval.shape)
    shape[axis] = 1
    if not all(map(is_quantized, values)) or values[0].ndim == 1:
        return NotImplemented
    expanded = [_reshaped(q, shape) for q in values]
    if NotImplemented in expanded:
        return NotImplemented
    return concatenated([q for (q,) in expanded], axis)


@add_rule("concatenate")
def _concatenate(interpreter, eqn, values):
    return concatenated(values, eqn.params["dimension"])


def concatenated(values, axis):
    if not is_quantized(values[0]):
        return NotImplemented
    first, *rest = values
    if not all(map(is_quantized, values)) or axis not in leading_axes(first):
        return NotImplemented
    if any(_kind(q) != _kind(first) for q in rest):
        return NotImplemented
    index = leading_axes(first).index(axis)
    wholes = [_with_all_rows(q) for q in values]
    rank = len(leading_axes(first))
    place = index if index < rank - 1 else rank + 1 + first.layout.row_axis
    stored = jtu.tree_map(
        lambda *leaves: lax.concatenate(leaves, place), *[q.stored for q in wholes]
    )
    return [dataclasses.replace(first, stored=stored, sharding=None)]


def _kind(q):
    return q.layout, q.axis, q.activation, q.dtype, q.inner, q.writable


def _with_all_rows(q: QuantizedArray) -> QuantizedArray:
    # Repeats stored arrays that all rows share, once for each row.
    *lead, _ = q.layout.shape(q.stored)

    def spread(a):
        shape = list(a.shape)
        shape[q.layout.row_axis] = lead[-1]
        return jnp.broadcast_to(a, shape)

    return dataclasses.replace(q, stored=jtu.tree_map(spread, q.stored))
