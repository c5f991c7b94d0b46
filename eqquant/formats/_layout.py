import dataclasses
from typing import Any, ClassVar, NamedTuple

import jax
import jax.tree_util as jtu
from jaxtyping import Array, Float

from ._base import AbstractFormat, Stored


@dataclasses.dataclass(frozen=True)
class Layout:
    """Describes how the numbers `W[*b, n, k]` lie in their stored arrays. A layout is a
    value: it is hashable and holds no arrays.

    - `format`: writes and reads the stored arrays, with axes `*b n _`.
    - `tail`: the number of positions beyond `k` in the last byte or block.
    - `row_axis`: the place of the axis `n` in each stored array. -2 is the order of the
        format. With -1 the last two axes are swapped, so that the contracted axis comes
        first. A vector has no rows, and always has -2.
    - `panels`: the sizes `(n, k)` of matrices whose rows lie in panels of 64, one panel
        after another, the fastest order for products with few rows of inputs. `None` if
        rows lie side by side. The contracted axis comes first in each panel (`row_axis`
        is -1), and a matrix is one axis of a stored array, `*b _`, whose elements are
        in the order of `*b n/64 m 64`. So a function that takes a part of the array, or
        joins it with another, raises an error instead of finding a matrix with other
        rows: the axes are missing, or the sizes differ.

    Stored arrays in the order of the format are called `rows`. Arrays that all rows
    share have size one in place of `n`, in panels, too.
    """

    format: AbstractFormat
    tail: int = 0
    row_axis: int = -2
    panels: tuple[int, int] | None = None

    panel_rows: ClassVar[int] = 64

    def to_rows(self, stored: Stored) -> Stored:
        """Returns the stored arrays in the order in which the format writes and
        reads."""
        if self.row_axis == -2:
            return stored
        if self.panels is None:
            return jtu.tree_map(_swapped, stored)
        *_, n, _ = self.shape(stored)
        return jtu.tree_map(lambda a: _from_panels(a, n), stored)

    def from_rows(self, rows: Stored) -> Stored:
        """The inverse of `to_rows`."""
        if self.row_axis == -2:
            return rows
        return jtu.tree_map(_to_panels if self.panels else _swapped, rows)

    def in_panels(self, n: int, k: int) -> "Layout":
        """Returns the layout with panels, for matrices of these sizes, if their rows
        fill panels; otherwise without."""
        whole = n > 0 and n % self.panel_rows == 0
        return dataclasses.replace(self, panels=(n, k) if whole else None)

    @property
    def side_by_side(self) -> "Layout":
        """The layout without panels."""
        return dataclasses.replace(self, panels=None)

    def without_panels(self, stored: Stored) -> Stored:
        """Returns the stored arrays in the layout `side_by_side`."""
        return self.side_by_side.from_rows(self.to_rows(stored))

    def by_row(self, entries: tuple[Any, ...]) -> tuple[Any, ...]:
        """Converts one entry for each axis of a stored array to one for each axis of
        `*b n _`, or back."""
        if self.row_axis == -2:
            return entries
        *lead, a, b = entries
        return (*lead, b, a)

    def decode(self, stored: Stored) -> Float[Array, "*b k"]:
        """Returns the numbers, in float32."""
        return self.format.decode(self.to_rows(stored), self.tail)

    def shape(self, stored: Stored) -> tuple[int, ...]:
        """Returns the shape `*b n k` of the numbers."""
        shape = self._shape(stored)
        if self.panels is not None and shape[-2:] != self.panels:
            raise self._cut(stored)
        return shape

    def _shape(self, stored):
        rows = stored if self.row_axis == -2 else self._structs_by_row(stored)
        # (A method bound to a Module is a Module, which is slow to make.)
        return type(self.format).shape(self.format, rows, self.tail)

    def ndim(self, a: Any) -> int:
        """Returns the number of axes of a stored array in the order of the format."""
        return len(a.shape) + (self.panels is not None and a.shape[-1:] != (1,))

    def _structs_by_row(self, stored):
        # (Not `jax.tree_util`, which takes longer than the rest of an eager product.)
        return {
            name: self._structs_by_row(a)
            if isinstance(a, dict)
            else _Struct(self.shape_by_row(a), a.dtype)
            for name, a in stored.items()
        }

    def shape_by_row(self, a: Any) -> tuple[int, ...]:
        """Returns the shape of a stored array in the order of the format."""
        if self.panels is None or a.shape[-1:] == (1,):
            return self.by_row(a.shape)
        n, _ = self.panels
        if len(a.shape) == 0 or a.shape[-1] % n != 0:
            raise self._cut({"": a})
        return (*a.shape[:-1], n, a.shape[-1] // n)

    def _cut(self, stored):
        shapes = ", ".join(str(a.shape) for a in jtu.tree_leaves(stored))
        n, k = self.panels or (0, 0)
        return ValueError(
            "The rows of this weight lie in panels, as `eqquant.tree_prepack` lays "
            "them, and its matrices should stay whole: they can be mapped, split and "
            "joined along leading axes only. Split or join first, and prepack then. "
            "(`with_sharding` and `eqquant.tree_shard` lay rows side by side again.) "
            f"Got stored arrays of shape {shapes}, which are not of whole matrices of "
            f"{n} rows of {k} numbers."
        )

    def preferred(self, ndim: int) -> "Layout":
        """Returns the layout with the `row_axis` that the format prefers, for an array
        with `ndim` axes `*b n k`."""
        row_axis = -2 if ndim == 1 else self.format.row_axis
        return dataclasses.replace(self, row_axis=row_axis, panels=None)

    def trimmed(self, stored: Stored, k: int) -> "Layout":
        """Returns the layout with the `tail` that leaves `k` contracted positions of
        these stored arrays."""
        whole = dataclasses.replace(self, tail=0)
        return dataclasses.replace(self, tail=whole._shape(stored)[-1] - k)


def _swapped(a):
    return a.swapaxes(-1, -2)


def _from_panels(a, n):
    if a.shape[-1] == 1:  # shared by all rows
        return _swapped(a)
    *lead, size = a.shape
    panels = (n // Layout.panel_rows, size // n, Layout.panel_rows)
    return _swapped(_gathered(a).reshape(*lead, *panels)).reshape(*lead, n, size // n)


def _to_panels(rows):
    *lead, n, m = rows.shape
    if n == 1:
        return _swapped(rows)
    rows = rows.reshape(*lead, n // Layout.panel_rows, Layout.panel_rows, m)
    return _swapped(rows).reshape(*lead, n * m)


def _gathered(a):
    # Gathers an array whose type carries a sharding. (The rows are on none of its
    # axes.)
    if not isinstance(a, jax.Array) or not jax.typeof(a).sharding.mesh.explicit_axes:
        return a
    return jax.sharding.reshard(a, jax.sharding.PartitionSpec(*[None] * a.ndim))


class _Struct(NamedTuple):
    # A cheaper `jax.ShapeDtypeStruct`, which takes ten times as long to make.
    shape: tuple[int, ...]
    dtype: Any


def encode(w: Float[Array, "*b k"], format: AbstractFormat) -> tuple[Stored, Layout]:
    """Returns the stored arrays of some numbers, in rows, and their layout."""
    stored = format.encode(w)
    return stored, Layout(format).trimmed(stored, w.shape[-1])


def round_trip(w: Float[Array, "*b k"], format: AbstractFormat) -> Float[Array, "*b k"]:
    """Returns the numbers after encoding and decoding in a format, in float32."""
    stored, layout = encode(w, format)
    return layout.decode(stored)
