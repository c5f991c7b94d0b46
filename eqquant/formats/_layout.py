from typing import Any, NamedTuple

import jax.tree_util as jtu

from ._base import AbstractFormat, Stored


# How the arrays that a format writes, `*b n _`, lie in memory: as they are, with the
# rows on axis -2, or with the last two axes swapped, and the rows on axis -1. Which one
# a product would rather have is for the format to say: `AbstractFormat.row_axis`.


def to_rows(stored: Stored, row_axis: int) -> Stored:
    """Stored arrays as the format writes and reads them, from how they lie."""
    if row_axis == -2:
        return stored
    return jtu.tree_map(lambda a: a.swapaxes(-1, -2), stored)


# Two axes change places, so each is the inverse of the other.
from_rows = to_rows


def by_row(entries: tuple[Any, ...], row_axis: int) -> tuple[Any, ...]:
    """From a tuple with an entry for each axis of a stored array to one for each axis
    of `*b n _`; or back."""
    if row_axis == -2:
        return entries
    *lead, a, b = entries
    return (*lead, b, a)


class _Struct(NamedTuple):
    # As `jax.ShapeDtypeStruct`, which takes ten times as long to make.
    shape: tuple[int, ...]
    dtype: Any


def shape_of(
    format: AbstractFormat, stored: Stored, tail: int, row_axis: int
) -> tuple[int, ...]:
    """The shape `*b n k` of the numbers, from the stored arrays as they lie."""
    stored = stored if row_axis == -2 else _structs_by_row(stored, row_axis)
    # (A method that is bound to a Module is a Module, and takes as long to make.)
    return type(format).shape(format, stored, tail)


def _structs_by_row(stored, row_axis):
    # (Not `jax.tree_util`, which takes longer than the rest of an eager product.)
    return {
        name: _structs_by_row(a, row_axis)
        if isinstance(a, dict)
        else _Struct(by_row(a.shape, row_axis), a.dtype)
        for name, a in stored.items()
    }
