import jax.numpy as jnp
import jax.tree_util as jtu
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

from .._product import as_tuple, Axis
from ..formats import Layout, Stored


def check_stored(stored: Stored, layout: Layout, axis: Axis) -> None:
    """Raises a `TypeError` if something took stored arrays for parameters, and a
    `ValueError` if `jax.vmap` maps them along an axis that is no leading one of the
    array that they stand for: now, or where what is being traced here is mapped."""

    leaves = jtu.tree_leaves(stored)
    for a in leaves:
        if not jnp.issubdtype(a.dtype, jnp.integer):
            raise TypeError(
                "The stored arrays of a `QuantizedArray` should be integers. Got "
                f"{a.dtype.name}: something took them for parameters. Filter those by "
                "`eqx.is_inexact_array`, not by `eqx.is_array`."
            )
        check_axes(a.ndim, layout, axis)
    checked_p.bind(*leaves, layout=layout, axis=axis)
    # What all rows share is of size one.
    shapes = [a.shape for a in leaves if a.ndim > 1]
    if len({shape[layout.row_axis] for shape in shapes} - {1}) > 1:
        raise ValueError(_sentence)


def check_axes(ndim: int, layout: Layout, axis: Axis) -> None:
    """Raises a `ValueError` if stored arrays have fewer axes than they must."""
    axes = as_tuple(axis)
    least = 1 if layout.row_axis == -2 else 2
    if ndim < least or ndim - 1 + len(axes) < -axes[0]:
        raise ValueError(_sentence)


_sentence = (
    "A `QuantizedArray` is mapped along leading axes: those in front of the axis that "
    "is contracted, and of its matrices. Got another one in `in_axes`, of `jax.vmap` "
    "say, which are those of its stored arrays. Map its `.dequantize()` instead."
)


# Of stored arrays, `vmap` does not ask whose axes it maps: that is seen where they are
# used, by what becomes of this. (What it gives is not used: a scan would keep a copy of
# that for the backward pass.)
checked_p = Primitive("checked")
checked_p.multiple_results = True
checked_p.def_impl(lambda *stored, **_: stored)
checked_p.def_abstract_eval(lambda *stored, **_: stored)
mlir.register_lowering(checked_p, lambda ctx, *stored, **_: stored)


def _batch_checked(stored, dims, *, layout, axis):
    axes = as_tuple(axis)
    for a, d in zip(stored, dims, strict=True):
        in_front = a.ndim - 1 + len(axes) + axes[0]
        # Of a matrix, the rows may be mapped, each of which is a vector.
        lead = a.ndim - 2 if a.ndim > 2 or layout.row_axis == -1 else 1
        if d is not None and d >= min(in_front, lead):
            raise ValueError(_sentence)
    return checked_p.bind(*stored, layout=layout, axis=axis), dims


batching.primitive_batchers[checked_p] = _batch_checked


def settled(stored: Stored) -> Stored:
    """Stored arrays that were computed: along whichever axes those were mapped that
    they are computed from, these are along the first."""
    return jtu.tree_map(settled_p.bind, stored)


settled_p = Primitive("settled")
settled_p.def_impl(lambda a: a)
settled_p.def_abstract_eval(lambda a: a)
mlir.register_lowering(settled_p, lambda ctx, a: [a])


def _batch_settled(operands, dims):
    (a,), (d,) = operands, dims
    return settled_p.bind(jnp.moveaxis(a, d, 0)), 0


batching.primitive_batchers[settled_p] = _batch_settled
