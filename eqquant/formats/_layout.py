import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ._base import AbstractFormat, Stored


@dataclasses.dataclass(frozen=True)
class Layout:
    """How the numbers `W[*b, n, k]` lie in their stored arrays. A value: it is hashable
    and holds no arrays.

    - `format`: writes and reads the stored arrays, with axes `*b n _`.
    - `tail`: the number of positions that the last byte or block has room for beyond
        `k`.
    - `row_axis`: the axis of each stored array that `n` is. -2 is as the format writes
        them. With -1 the last two axes are swapped, and the contracted one comes first.
        A vector has no rows to choose for, and always has -2.
    - `panels`: whether the rows of a matrix lie in panels of 64, one panel after
        another, as products with few rows of inputs read them fastest. The shape of a
        stored array is still `*b m n`, but its elements are those of `*b n/64 m 64`.
        The contracted axis comes first in each panel: `row_axis` is -1.

    Stored arrays are called `rows` where they lie as the format writes them.
    """

    format: AbstractFormat
    tail: int = 0
    row_axis: int = -2
    panels: bool = False

    panel_rows: ClassVar[int] = 64

    def to_rows(self, stored: Stored) -> Stored:
        """The stored arrays as the format writes and reads them."""
        if self.row_axis == -2:
            return stored
        return jtu.tree_map(_from_panels if self.panels else _swapped, stored)

    def from_rows(self, rows: Stored) -> Stored:
        """The inverse of `to_rows`."""
        if self.row_axis == -2:
            return rows
        return jtu.tree_map(_to_panels if self.panels else _swapped, rows)

    @property
    def side_by_side(self) -> "Layout":
        """The same layout without panels."""
        return dataclasses.replace(self, panels=False)

    def without_panels(self, stored: Stored) -> Stored:
        """The stored arrays in the layout `side_by_side`."""
        return self.side_by_side.from_rows(self.to_rows(stored))

    def by_row(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """From one entry for each axis of a stored array to one for each axis of
        `*b n _`, or back."""
        if self.row_axis == -2:
            return entries
        *lead, a, b = entries
        return (*lead, b, a)

    def decode(self, stored: Stored) -> Float[Array, "*b k"]:
        """The numbers, in float32."""
        return self.format.decode(self.to_rows(stored), self.tail)

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """The shape `*b n k` of the numbers."""
        stored = stored if self.row_axis == -2 else self._structs_by_row(stored)
        # (A method bound to a Module is a Module, and takes as long to make.)
        return type(self.format).shape(self.format, stored, self.tail)

    def _structs_by_row(self, stored):
        # (Not `jax.tree_util`, which takes longer than the rest of an eager product.)
        return {
            name: self._structs_by_row(a)
            if isinstance(a, dict)
            else _Struct(self.by_row(a.shape), a.dtype)
            for name, a in stored.items()
        }

    def preferred(self, ndim: int) -> "Layout":
        """The same layout, with the `row_axis` that the format asks for, of an array
        with so many axes `*b n k`."""
        row_axis = -2 if ndim == 1 else self.format.row_axis
        return dataclasses.replace(self, row_axis=row_axis, panels=False)

    def trimmed(self, stored: Stored, k: int) -> "Layout":
        """The same layout, with the `tail` that leaves `k` contracted positions of
        these stored arrays."""
        whole = dataclasses.replace(self, tail=0)
        return dataclasses.replace(self, tail=whole.shape(stored)[-1] - k)


def _swapped(a):
    return a.swapaxes(-1, -2)


def _from_panels(a):
    *lead, m, n = a.shape
    if n == 1:  # shared by all rows
        return _swapped(a)
    a = _gathered(a).reshape(*lead, -1, m, Layout.panel_rows)
    return _swapped(a).reshape(*lead, n, m)


def _to_panels(rows):
    *lead, n, m = rows.shape
    if n == 1:
        return _swapped(rows)
    rows = rows.reshape(*lead, -1, Layout.panel_rows, m)
    return _swapped(rows).reshape(*lead, m, n)


def _gathered(a):
    # If its type carries a sharding. (No axis of it is that of the rows.)
    if not isinstance(a, jax.Array) or not jax.typeof(a).sharding.mesh.explicit_axes:
        return a
    return jax.sharding.reshard(a, jax.sharding.PartitionSpec(*[None] * a.ndim))


class _Struct(NamedTuple):
    # As `jax.ShapeDtypeStruct`, which takes ten times as long to make.
    shape: tuple[int, ...]
    dtype: Any


def encode(w: Float[Array, "*b k"], format: AbstractFormat) -> tuple[Stored, Layout]:
    """The stored arrays of some numbers, in rows, and their layout."""
    stored = format.encode(w)
    return stored, Layout(format).trimmed(stored, w.shape[-1])


def round_trip(w: Float[Array, "*b k"], format: AbstractFormat) -> Float[Array, "*b k"]:
    """The numbers as a format would give them back, in float32."""
    stored, layout = encode(w, format)
    return layout.decode(stored)
