import dataclasses
import functools as ft
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from ..._array import is_quantized, quantize
from ..._product import Axis
from ...formats import AbstractFormat
from ...kernels import can_rearrange
from .._checkpoint import Entry, struct_of, written
from .._contracted import contracted_by_shape
from . import _packed


Within: TypeAlias = Callable[[dict[str, np.ndarray]], list[dict[str, np.ndarray]]]


@dataclasses.dataclass(frozen=True, eq=False)
class Piece:
    """An array that is not read yet, or made of such arrays.

    - `names`: the names of the arrays of the checkpoint that it is made of.
    - `shape`, `dtype`, `format`, `axis`: as in a `QuantizedArray`; `format` is `None`
        for a dense array.
    - `place`: the position of the first of these arrays in the checkpoint.
    - `parents`: the pieces that it is made of.
    - `make`: makes the array, given a function for each parent that reads it.
    - `known`: the entry or the array itself. `None` if it is made of others.
    - `within`: takes the memory of its stored arrays, and returns the memory for the
        stored arrays of each parent. `None` if these are not parts of it in which the
        numbers of a row are next to each other.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: Any
    format: AbstractFormat | None
    axis: Axis
    place: int
    parents: tuple["Piece", ...]
    make: Callable[[Sequence[Callable[[], Any]]], Any] = dataclasses.field(repr=False)
    known: Any = dataclasses.field(default=None, repr=False)
    within: Within | None = dataclasses.field(default=None, repr=False)

    def struct(self) -> Any:
        """Returns the array with structs instead of numbers, or the array itself if it
        is in memory."""
        if self.known is None:
            return struct_of(self.shape, self.dtype, self.format, self.axis)
        return self.known.struct() if isinstance(self.known, Entry) else self.known

    def output_axis(self, axis: int | None) -> int:
        """Returns the axis to join or split, counted from the end. Raises a
        `ValueError` if the array has no such axis, or is packed along it."""
        if self.format is not None:
            if self.axis not in (-1, -2) or len(self.shape) < 2:
                raise ValueError("its blocks lie along all axes")
            rows = -3 - self.axis
            if axis not in (None, rows):
                raise ValueError(f"it is quantized along all axes but {rows}")
            return rows
        axis = axis or (-2 if len(self.shape) > 1 else -1)
        if len(self.shape) < -axis:
            raise ValueError(f"it has no axis {axis}")
        return axis


def sources(found: Mapping[str, Any], read: Callable[[str], Any]) -> list[Piece]:
    """Returns the arrays of a checkpoint, from their descriptions: entries, arrays, or
    structs. `read` reads them by their names."""

    def piece(place, name):
        x = found[name]
        packed = x.format is not None if isinstance(x, Entry) else is_quantized(x)
        format, axis = (x.format, x.axis) if packed else (None, -1)
        make = lambda _: read(name)
        shape = tuple(x.shape)
        return Piece((name,), shape, x.dtype, format, axis, place, (), make, x)

    return [piece(place, name) for place, name in enumerate(found)]


def joined(pieces: Sequence[Piece], axis: int | None, groups: int) -> Piece:
    """Joins arrays along the axis of the outputs. Raises a `ValueError` if they do not
    fit together."""
    first = pieces[0]
    _check_alike(pieces)
    along = first.output_axis(axis)
    sizes = [piece.shape[along] for piece in pieces]
    for piece in pieces:
        if _without(piece.shape, along) != _without(first.shape, along):
            raise _differs(pieces, "shape")
    _check_groups(sizes, groups)
    _check_rows(first, sizes, groups)
    shape = _resized(first.shape, along, sum(sizes))
    make = lambda reads: _packed.joined(reads, sizes, along, groups)
    ends = np.cumsum(sizes).tolist()

    def within(stored):
        return [
            {name: a[..., end - size : end] for name, a in stored.items()}
            for size, end in zip(sizes, ends)
        ]

    return _made(pieces, shape, make, within if groups == 1 else None)


def added(pieces: Sequence[Piece]) -> Piece:
    """Adds arrays. Raises a `ValueError` if they are not alike, or not dense arrays of
    floats."""
    first = pieces[0]
    _check_alike(pieces)
    if any(piece.shape != first.shape for piece in pieces):
        raise _differs(pieces, "shape")
    if first.format is not None or not jnp.issubdtype(first.dtype, jnp.floating):
        raise ValueError("only arrays of floats that are not quantized are added")
    wide = np.promote_types(first.dtype, np.float32)

    def make(reads):
        total = sum(np.asarray(read()).astype(wide) for read in reads)
        return np.asarray(total).astype(first.dtype)

    return _made(pieces, first.shape, make)


def parts(
    piece: Piece, sizes: Sequence[int], axis: int | None, groups: int
) -> list[Piece]:
    """The inverse of `joined`: splits an array into parts. Raises a `ValueError` if it
    does not have these parts."""
    along = piece.output_axis(axis)
    if sum(sizes) != piece.shape[along]:
        text = " + ".join(map(str, sizes))
        raise ValueError(f"its size is {piece.shape[along]}, and not {text}")
    _check_groups(sizes, groups)
    _check_rows(piece, sizes, groups)

    def part(i):
        make = lambda reads: _packed.part(reads[0](), sizes, along, groups, i)
        return _made([piece], _resized(piece.shape, along, sizes[i]), make)

    return [part(i) for i in range(len(sizes))]


def stacked(pieces: Sequence[Piece], lead: tuple[int, ...]) -> Piece:
    """Stacks arrays along new leading axes. Raises a `ValueError` if they are not
    alike."""
    first = pieces[0]
    _check_alike(pieces)
    if any(piece.shape != first.shape for piece in pieces):
        raise _differs(pieces, "shape")
    if first.format is not None and len(first.shape) < 2:
        raise ValueError("they are vectors, whose stack would be a matrix")
    make = lambda reads: _packed.stacked(reads, lead)

    def within(stored):
        return [
            {name: a[index] for name, a in stored.items()}
            for index in np.ndindex(*lead)
        ]

    return _made(pieces, (*lead, *first.shape), make, within)


def picked(piece: Piece, number: int) -> Iterable[tuple[tuple[int, ...], Piece]]:
    """The inverse of `stacked` along `number` axes: yields the index of each array, and
    the array. Raises a `ValueError` if it has fewer axes."""
    in_front = len(piece.shape)
    if piece.format is not None:
        first = piece.axis if isinstance(piece.axis, int) else piece.axis[0]
        in_front = min(in_front - 2, in_front + first)
    if number > in_front:
        raise ValueError(f"its shape is {piece.shape}")

    def pick(index):
        make = lambda reads: _packed.picked(reads[0](), index)
        return _made([piece], piece.shape[number:], make)

    for index in np.ndindex(*piece.shape[:number]):
        yield index, pick(index)


def transposed(piece: Piece) -> Piece:
    """Swaps the last two axes. Raises a `ValueError` if it has fewer axes, or if blocks
    lie along both."""
    if len(piece.shape) < 2 or piece.axis not in (-1, -2):
        raise ValueError(f"its shape is {piece.shape}")
    *lead, n, k = piece.shape
    make = lambda reads: _packed.transposed(reads[0]())
    found = _made([piece], (*lead, k, n), make)
    axis = -1 if piece.format is None else -3 - piece.axis
    return dataclasses.replace(found, axis=axis)


def quantized(piece: Piece, format: AbstractFormat, axis: int) -> Piece:
    """Quantizes an array, unless it already has this format. Arrays in another format
    are quantized along the same axis as before. Filters of convolutions, which are
    recognized by their shape, are quantized along all axes but the first, and other
    arrays along `axis`. Raises a `ValueError` if it is a vector, or if the format does
    not fit it."""
    if piece.format == format:
        return piece
    if len(piece.shape) < 2:
        raise ValueError(f"a vector is not quantized, and its shape is {piece.shape}")
    if not jnp.issubdtype(piece.dtype, jnp.floating):
        raise ValueError(f"numbers of {np.dtype(piece.dtype).name} are not quantized")
    by_shape = contracted_by_shape(piece.shape)
    along = by_shape if isinstance(by_shape, tuple) else axis
    along = along if piece.format is None else piece.axis
    encode = lambda w: quantize(w, format, axis=along)
    jax.eval_shape(encode, jax.ShapeDtypeStruct(piece.shape, piece.dtype))

    def make(reads):
        x = reads[0]()
        return encode(x.dequantize() if is_quantized(x) else x)

    found = _made([piece], piece.shape, make)
    return dataclasses.replace(found, format=format, axis=along)


def evaluated(pieces: Sequence[Piece], use: Callable[[int, Any], None]) -> None:
    """Reads arrays, and calls `use(i, array)` for each, in the order of the checkpoint.
    Arrays that others are made of are read once, and freed after their last use."""
    left: dict[int, int] = {}

    def count(piece):
        left[id(piece)] = left.get(id(piece), 0) + 1
        if left[id(piece)] == 1:
            for parent in piece.parents:
                count(parent)

    for piece in pieces:
        count(piece)
    values: dict[int, Any] = {}

    def value(piece):
        found = values.pop(id(piece)) if id(piece) in values else make(piece)
        left[id(piece)] -= 1
        if left[id(piece)] > 0:
            values[id(piece)] = found
        return found

    def in_place(piece):
        # Whether all its sources can be written directly to their places in it.
        if left[id(piece)] > 1 or id(piece) in values:
            return False
        if isinstance(piece.known, Entry):
            return piece.known.write is not None
        return piece.within is not None and all(map(in_place, piece.parents))

    def write(piece, stored):
        if isinstance(piece.known, Entry):
            piece.known.write_to(stored)
            return
        for parent, part in zip(piece.parents, piece.within(stored), strict=True):
            write(parent, part)

    def make(piece):
        if not piece.parents:
            return piece.make([])
        if piece.within and all(map(in_place, piece.parents)) and can_rearrange():
            return written(piece.struct(), ft.partial(write, piece))
        try:
            reads = [ft.partial(value, parent) for parent in piece.parents]
            return _packed.on_device(piece.make(reads))
        except _packed.Different as e:
            names = ", ".join(map(repr, piece.names))
            raise ValueError(f"{names} cannot be one array: {e}.") from e

    for i in sorted(range(len(pieces)), key=lambda i: pieces[i].place):
        use(i, value(pieces[i]))


def _made(pieces, shape, make, within=None):
    first = pieces[0]
    return Piece(
        names=tuple(dict.fromkeys(name for p in pieces for name in p.names)),
        shape=tuple(shape),
        dtype=first.dtype,
        format=first.format,
        axis=first.axis,
        place=min(piece.place for piece in pieces),
        parents=tuple(pieces),
        make=make,
        within=within,
    )


def _check_alike(pieces):
    for kind in ("format", "axis", "dtype"):
        values = [getattr(piece, kind) for piece in pieces]
        if any(value != values[0] for value in values):
            raise _differs(pieces, kind)


def _differs(pieces, kind):
    # Name one array for each value.
    found: dict[str, str] = {}
    for piece in pieces:
        found.setdefault(str(getattr(piece, kind)), piece.names[0])
    text = " and ".join(f"{value} of {name!r}" for value, name in found.items())
    hint = ". Name it `Quantized(..., format)`" if kind == "format" else ""
    return ValueError(f"they differ in their {kind}: {text}{hint}")


def _check_groups(sizes, groups):
    if any(size % groups != 0 for size in sizes):
        raise ValueError(f"{groups} groups do not divide the sizes {list(sizes)}")


def _check_rows(piece, sizes, groups):
    together = 1 if piece.format is None else piece.format.rows_together
    if any(size // groups % together != 0 for size in sizes):
        raise ValueError(
            f"{piece.format} stores {together} rows together, which do not divide the "
            f"sizes {list(sizes)}" + (f" of {groups} groups" if groups > 1 else "")
        )


def _without(shape, axis):
    return shape[: len(shape) + axis] + shape[len(shape) + axis + 1 :]


def _resized(shape, axis, size):
    found = list(shape)
    found[axis] = size
    return tuple(found)
