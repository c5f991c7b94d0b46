import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Shaped

from .._product import as_tuple, Axis, spec_of, with_spec
from ._array import QuantizedArray
from ._stored import side_by_side


# The axes of an array that are not contracted are, in order, the leading axes of its
# stored arrays; the last of them are the rows. To slice, permute, reshape or broadcast
# them, do the same to each stored array: nothing is decoded, and nothing is lost.


def blocked_axes(q: QuantizedArray) -> tuple[int, ...]:
    """The axes that blocks lie along, counted from the front."""
    ndim = q.ndim
    return tuple(ndim + i for i in as_tuple(q.axis))


def leading_axes(q: QuantizedArray) -> tuple[int, ...]:
    """The axes that blocks do not lie along, counted from the front."""
    ndim, axes = q.ndim, as_tuple(q.axis)
    return tuple(i for i in range(ndim) if i - ndim not in axes)


def is_apart(q: QuantizedArray, axis: int) -> bool:
    """Whether some entries of an axis, counted from the front, can be taken without the
    others: that is so for leading axes, except for rows that are stored together."""
    lead = leading_axes(q)
    return axis in lead and (axis != lead[-1] or q.format.rows_together == 1)


def axis_from_end(axes: Sequence[int], ndim: int) -> Axis:
    counted = tuple(i - ndim for i in axes)
    return counted[0] if len(counted) == 1 else counted


def along(
    q: QuantizedArray,
    axis: int,
    fn: Callable[[Shaped[Array, "..."], int], Shaped[Array, "..."]],
) -> QuantizedArray:
    """Applies `fn(a, i)` to each stored array `a`, where its axis `i` is the leading
    `axis` of `q`. `fn` should keep the number of axes."""
    index = leading_axes(q).index(axis)
    *lead, _ = q.layout.shape(q.stored)
    is_row, row_axis = index == len(lead) - 1, q.layout.row_axis
    q = side_by_side(q) if is_row else q

    def apply(a):
        if not is_row:
            return fn(a, index)
        # An array that all rows share is also shared by other rows.
        shared = a.shape[row_axis] != lead[-1]
        return a if shared else fn(a, a.ndim + row_axis)

    return undeclared(q, stored=jtu.tree_map(apply, q.stored))


def take_along(q: QuantizedArray, axis: int, start: Any, size: int) -> QuantizedArray:
    """Returns a slice of a leading axis, whose `start` may be traced. A negative
    `start` is clamped to zero: it does not count from the end."""

    def take(a, index):
        return lax.dynamic_slice_in_dim(
            a, start, size, index, allow_negative_indices=False
        )

    return along(q, axis, take)


def permuted(q: QuantizedArray, order: Sequence[int]) -> QuantizedArray | None:
    """Returns `q.transpose(order)`, or `None` if that changes the order of the
    contracted axes, or moves rows that are stored together: the codes would have to be
    packed again."""
    blocked = blocked_axes(q)
    axes = [order.index(i) for i in blocked]
    if axes != sorted(axes):
        return None
    lead = leading_axes(q)
    new = [i for i in order if i not in blocked]
    if lead and new[-1] != lead[-1] and not is_apart(q, lead[-1]):
        return None
    moved = _reordered(q, [lead.index(i) for i in new])
    sharding = q.sharding
    if sharding is not None:
        # The declared sharding counts axes from the last.
        spec = (*[None] * q.ndim, *spec_of(sharding))[-q.ndim :]
        sharding = with_spec(sharding, PartitionSpec(*[spec[i] for i in order]))
    return dataclasses.replace(
        moved, axis=axis_from_end(axes, q.ndim), sharding=sharding
    )


def _reordered(q, order):
    # Permutes the leading axes. The caller has to set `axis`.
    number = len(order)
    if list(order) == [*range(number)]:
        return q

    def move(a, lead):
        return a.transpose(*order[:lead], *range(lead, a.ndim))

    return _restacked(q, move, keeps_rows=order[-1] == number - 1)


def reshaped_leading(q: QuantizedArray, lead: tuple[int, ...]) -> QuantizedArray:
    """Reshapes the leading axes of `q`. The caller has to set the `axis` of the
    result."""
    *old, _ = q.layout.shape(q.stored)
    if lead == tuple(old):
        return q

    def reshape(a, number):
        new = lead if number == len(old) else lead[:-1]
        return a.reshape(*new, *a.shape[number:])

    keeps_rows = len(old) > 0 and lead[-1] == old[-1]
    keeps_rows = keeps_rows and math.prod(lead[:-1]) == math.prod(old[:-1])
    return _restacked(q, reshape, keeps_rows=keeps_rows)


def broadcast_leading(
    q: QuantizedArray, lead: tuple[int, ...], dims: tuple[int, ...]
) -> QuantizedArray:
    """Broadcasts `q` to leading axes of these sizes. Its own leading axes become the
    axes `dims`."""
    *old, _ = q.layout.shape(q.stored)

    def broadcast(a, number):
        new = lead if number == len(old) else lead[:-1]
        shape = (*new, *a.shape[number:])
        places = (*dims[:number], *range(len(new), len(shape)))
        return lax.broadcast_in_dim(a, shape, places)

    keeps_rows = len(old) > 0 and dims[-1] == len(lead) - 1 and old[-1] == lead[-1]
    return _restacked(q, broadcast, keeps_rows=keeps_rows)


def _restacked(q, fn, keeps_rows):
    # `fn(a, number)` changes the first axes of a stored array, and keeps the others. If
    # it keeps the rows, it applies to the stored arrays without a change of layout.
    *lead, _ = q.layout.shape(q.stored)
    if keeps_rows:
        stored = jtu.tree_map(lambda a: fn(a, len(lead) - 1), q.stored)
        return undeclared(q, stored=stored)
    q = side_by_side(q)

    def apply(a):
        return fn(jnp.broadcast_to(a, (*lead, a.shape[-1])), len(lead))

    rows = jtu.tree_map(apply, q.layout.to_rows(q.stored))
    # A vector becomes a matrix, which has rows.
    layout = q.layout if lead else q.layout.preferred(2)
    return undeclared(q, stored=layout.from_rows(rows), layout=layout)


def undeclared(q: QuantizedArray, **changes) -> QuantizedArray:
    """Replaces fields of `q`, and removes its declared sharding, which belongs to other
    axes."""
    return dataclasses.replace(q, sharding=None, **changes)
