import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from ..._array import is_quantized, relaid
from ...kernels import empty


# Functions that read arrays, one after another. Arrays to join or stack are written to
# their places in the result, so that only one of them is in memory.
Reads = Sequence[Callable[[], Any]]


class Different(Exception):
    """Arrays whose numbers do not allow joining them."""


def joined(reads: Reads, sizes: Sequence[int], axis: int, groups: int) -> Any:
    """Joins arrays along an axis, counted from the end, where they have these `sizes`.
    Quantized arrays are joined along the axis of their rows. Raises `Different` if
    numbers differ that all rows would share."""
    first, rooms, start = None, [], 0
    for read, size in zip(reads, sizes, strict=True):
        x = _as_first(read(), first)
        along = _axis(x, axis)
        leaves = [_of_rows(a, along, size) for a in _leaves(x)]
        if first is None:
            first = x
            rooms = [_room(a, along, size, sum(sizes)) for a in leaves]
        for i, (room, a) in enumerate(zip(rooms, leaves, strict=True)):
            if a.shape[along] == size:
                _grouped(room, along, groups, start, size)[...] = _grouped(
                    a, along, groups, 0, size
                )
            elif start == 0:
                room[...] = a
            elif not np.array_equal(room, a):
                (key, *_), _ = jtu.tree_leaves_with_path(x.stored)[i]
                raise Different(f"each has one {key.key!r} for all of its rows")
        start += size
    return _with(first, rooms)


def part(x: Any, sizes: Sequence[int], axis: int, groups: int, index: int) -> Any:
    """Returns one of the parts of an array that `joined` would join."""
    total, start, size = sum(sizes), sum(sizes[:index]), sizes[index]
    along = _axis(x, axis)

    def of(a):
        if a.shape[along] != total:
            return a
        room = _room(a, along, total, size)
        found = _grouped(a, along, groups, start, size)
        _grouped(room, along, groups, 0, size)[...] = found
        return room

    return _with(x, [of(a) for a in _leaves(x)])


def stacked(reads: Reads, lead: tuple[int, ...]) -> Any:
    """Stacks arrays along new leading axes of these sizes."""
    first, rooms = None, []
    for index, read in zip(np.ndindex(*lead), reads, strict=True):
        x = _as_first(read(), first)
        leaves = _leaves(x)
        if first is None:
            first, rooms = x, [empty((*lead, *a.shape), a.dtype) for a in leaves]
        for room, a in zip(rooms, leaves, strict=True):
            room[index] = a
    return _with(first, rooms)


def picked(x: Any, index: tuple[int, ...]) -> Any:
    """Returns one of the arrays that `stacked` would stack."""
    return _with(x, [_copy(a[index]) for a in _leaves(x)])


def transposed(x: Any) -> Any:
    """Swaps the last two axes."""
    return x.mT if is_quantized(x) else _copy(np.asarray(x).swapaxes(-1, -2))


def on_device(x: Any) -> Any:
    """Moves an array to a device. The functions above return arrays in host memory,
    which JAX uses without a copy on a CPU."""
    return jtu.tree_map(jax.device_put, x)


def _as_first(x, first):
    if first is None or not is_quantized(x) or x.layout == first.layout:
        return x
    return relaid(x, first.layout)


def _leaves(x):
    return [np.asarray(a) for a in jtu.tree_leaves(x)]


def _with(x, leaves):
    if not is_quantized(x):
        return leaves[0]
    stored = jtu.tree_unflatten(jtu.tree_structure(x.stored), leaves)
    # The axes have changed, so a declared sharding no longer applies.
    return dataclasses.replace(x, stored=stored, sharding=None)


def _axis(x, axis):
    return x.layout.row_axis if is_quantized(x) else axis


def _of_rows(a, along, size):
    # Repeats a number that all rows share for each row, because the other arrays may
    # have another number. (With a single row, it belongs to that row already.)
    other = -3 - along
    alone = a.ndim > 1 and a.shape[along] == 1 and a.shape[other] == 1
    if not alone or size == 1:
        return a
    shape = list(a.shape)
    shape[along] = size
    return np.broadcast_to(a, shape)


def _room(a, along, size, total):
    shape = list(a.shape)
    if shape[along] == size:
        shape[along] = total
    return empty(tuple(shape), a.dtype)


def _grouped(a, along, groups, start, size):
    # Returns a view of a part of this `size`, which takes its share of each group.
    axis = a.ndim + along
    lead, n, rest = a.shape[:axis], a.shape[axis], a.shape[axis + 1 :]
    if groups == 1:
        return a[(*[slice(None)] * axis, slice(start, start + size))]
    a = a.reshape(*lead, groups, n // groups, *rest)
    place = slice(start // groups, (start + size) // groups)
    return a[(*[slice(None)] * (axis + 1), place)]


def _copy(a):
    room = empty(a.shape, a.dtype)
    room[...] = a
    return room
