import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from .._product import as_tuple, Axis
from ..formats import AbstractGrid, Layout, Stored


def check_stored(stored: Stored, layout: Layout, axis: Axis) -> None:
    """Raises a `TypeError` if the stored arrays were treated as parameters, and a
    `ValueError` if `jax.vmap` maps them along an axis that is not a leading axis of the
    array: now, or later, when the traced function is mapped."""

    leaves = jtu.tree_leaves(stored)
    for a in leaves:
        if not jnp.issubdtype(a.dtype, jnp.integer):
            raise TypeError(
                "The stored arrays of a `QuantizedArray` should be integers. Got "
                f"{a.dtype.name}: they were treated as parameters. Select parameters "
                "with `eqx.is_inexact_array`, not with `eqx.is_array`."
            )
        check_axes(a, layout, axis)
    checked_p.bind(*leaves, layout=layout, axis=axis)
    # An array that all rows share has size one along the rows.
    shapes = [layout.shape_by_row(a) for a in leaves if layout.ndim(a) > 1]
    if len({shape[-2] for shape in shapes} - {1}) > 1:
        raise ValueError(_sentence)
    if _number_of_blocks(stored, layout) not in (None, _wanted_blocks(stored, layout)):
        raise ValueError(_sentence)


# (An array that was mapped along its rows and stacked along its blocks may otherwise
# look like one whose rows share their scales.)
def _number_of_blocks(stored, layout):
    grid = isinstance(layout.format, AbstractGrid) and not layout.format.ordered
    if not grid or layout.ndim(stored["scale"]) < 2:
        return None
    return layout.shape_by_row(stored["scale"])[-1]


def _wanted_blocks(stored, layout):
    size = layout.format.block_size
    return 1 if size is None else -(-layout.shape(stored)[-1] // size)


def check_axes(a: Any, layout: Layout, axis: Axis) -> None:
    """Raises a `ValueError` if a stored array has too few axes."""
    axes, ndim = as_tuple(axis), layout.ndim(a)
    least = 1 if layout.row_axis == -2 else 2
    if ndim < least or ndim - 1 + len(axes) < -axes[0]:
        raise ValueError(_sentence)


_sentence = (
    "A `QuantizedArray` can be mapped along leading axes only: those in front of its "
    "contracted axis and of its matrices. Got another one, from the `in_axes` of "
    "`jax.vmap` for example, which apply to the stored arrays. Map its `.dequantize()` "
    "instead. (The stored arrays of a weight that `eqquant.tree_prepack` laid in "
    "panels have fewer axes, and fit into no other array.)"
)


# `vmap` maps the leaves of a PyTree without asking their class. This primitive only has
# a batching rule, which sees the mapped axes and raises. (Its results are not used: a
# scan would keep a copy of them for the backward pass.)
checked_p = Primitive("checked")
checked_p.multiple_results = True
checked_p.def_impl(lambda *stored, **_: stored)
checked_p.def_abstract_eval(lambda *stored, **_: stored)
mlir.register_lowering(checked_p, lambda ctx, *stored, **_: stored)


def _batch_checked(stored, dims, *, layout, axis):
    axes = as_tuple(axis)
    for a, d in zip(stored, dims, strict=True):
        ndim = layout.ndim(a)
        in_front = ndim - 1 + len(axes) + axes[0]
        # The rows of a matrix may be mapped, too: each of them is a vector.
        lead = ndim - 2 if ndim > 2 or layout.row_axis == -1 else 1
        if d is not None and d >= min(in_front, lead):
            raise ValueError(_sentence)
    return checked_p.bind(*stored, layout=layout, axis=axis), dims


batching.primitive_batchers[checked_p] = _batch_checked


def as_mapped(q: Any) -> Any:
    """Returns a `QuantizedArray` after a check that `jax.vmap` maps it along leading
    axes only. Call this before its shape is read."""
    return checked(q) if isinstance(first_of(q.stored), Tracer) else q


def checked(q: Any) -> Any:
    """Returns `q` after `check_stored`."""
    check_stored(q.stored, q.layout, q.axis)
    return q


def first_of(stored: Stored) -> Any:
    """Returns the first stored array."""
    a = next(iter(stored.values()))
    return first_of(a) if isinstance(a, dict) else a


def side_by_side(q: Any) -> Any:
    """Returns `q` with its rows outside of panels (see `Layout`)."""
    if q.layout.panels is None:
        return q
    stored, layout = q.stored, q.layout
    leaves = jtu.tree_leaves(stored)
    if all(isinstance(a, jax.ShapeDtypeStruct) for a in leaves):
        stored = jax.eval_shape(layout.without_panels, stored)
    elif all(isinstance(a, jax.Array | np.ndarray) for a in leaves):
        stored = layout.without_panels(stored)
    else:
        return q  # filtered: it has no shape
    return dataclasses.replace(q, stored=stored, layout=layout.side_by_side)


def settled(stored: Stored) -> Stored:
    """Prepares freshly computed stored arrays. Under `vmap`, their mapped axis becomes
    the first, whichever axis of the operands was mapped, so that it is a leading
    axis."""
    return jtu.tree_map(settled_p.bind, stored)


settled_p = Primitive("settled")
settled_p.def_impl(lambda a: a)
settled_p.def_abstract_eval(lambda a: a)
mlir.register_lowering(settled_p, lambda ctx, a: [a])


def _batch_settled(operands, dims):
    (a,), (d,) = operands, dims
    return settled_p.bind(jnp.moveaxis(a, d, 0)), 0


batching.primitive_batchers[settled_p] = _batch_settled


# Integers have no derivatives, but second derivatives ask for them.
def _jvp_checked(stored, tangents, **params):
    out = checked_p.bind(*stored, **params)
    return out, [ad.Zero(jax.typeof(a).to_tangent_aval()) for a in out]


def _jvp_settled(operands, tangents):
    out = settled_p.bind(*operands)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


ad.primitive_jvps[checked_p] = _jvp_checked
ad.primitive_jvps[settled_p] = _jvp_settled
