import math
from typing import Any, NamedTuple

from jaxtyping import Array, Float

from ..._product import as_tuple, Axis


class Matrix(NamedTuple):
    """An array as a stack of matrices whose columns products contract.

    - `stack`: the sizes of the stack axes.
    - `outs`, `ins`: the sizes of the axes of the rows, and of the columns; there may be
        several of each.
    - `is_last`: whether the columns are the last axes of the array.
    """

    stack: tuple[int, ...]
    outs: tuple[int, ...]
    ins: tuple[int, ...]
    is_last: bool

    @property
    def n(self) -> int:
        return math.prod(self.outs)

    @property
    def k(self) -> int:
        return math.prod(self.ins)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array."""
        inner = (*self.outs, *self.ins) if self.is_last else (*self.ins, *self.outs)
        return (*self.stack, *inner)

    def to_rows(self, w: Float[Array, "..."]) -> Float[Array, "*b n k"]:
        if self.is_last:
            return w.reshape(*self.stack, self.n, self.k)
        return w.reshape(*self.stack, self.k, self.n).mT

    def from_rows(self, w: Float[Array, "*b n k"]) -> Float[Array, "..."]:
        return (w if self.is_last else w.mT).reshape(self.shape)

    def split(self, entries: Any) -> tuple[Any, Any, Any]:
        """Splits a list with an entry for each axis of the array into the entries of
        the stack, of the rows, and of the columns."""
        start = len(self.stack)
        middle = start + len(self.outs if self.is_last else self.ins)
        stack, a, b = entries[:start], entries[start:middle], entries[middle:]
        return (stack, a, b) if self.is_last else (stack, b, a)


def matrix_of(shape: tuple[int, ...], axis: Axis) -> Matrix | None:
    """Returns the matrices of an array whose products contract one or several axes. All
    axes behind these belong to the rows; if there are none, the axis before them does.
    `None` if there are no rows, or if the axes are not next to each other."""
    axes = sorted(as_tuple(axis))
    start, stop = axes[0], axes[-1] + 1
    if axes != list(range(start, stop)) or len(shape) < 1 - start - (stop < 0):
        return None
    if stop < 0:
        return Matrix(shape[:start], shape[stop:], shape[start:stop], False)
    return Matrix(shape[: start - 1], (shape[start - 1],), shape[start:], True)
