from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

from jax import lax
from jax.extend.core import JaxprEqn

from ._table import any_of, heeds


# Describes, in few terms, how primitives that only move numbers change an array. This
# is the only list of such primitives: `implicit` applies the moves to packed arrays,
# and `_trace` to views of the leaves of a model.
#
# Axes of primitives may be NumPy's integers; axes of moves are Python's.
#
# An index that is not a constant is an operand of the equation, as given by the caller.


class Transpose(NamedTuple):
    """Axis `i` of the result is axis `order[i]` of the array."""

    order: tuple[int, ...]


class Reshape(NamedTuple):
    """Arranges the same numbers, in row-major order, in another shape."""

    shape: tuple[int, ...]


class Broadcast(NamedTuple):
    """Axis `i` of the array becomes axis `dims[i]` of the result, and is repeated if
    the sizes of the two differ."""

    shape: tuple[int, ...]
    dims: tuple[int, ...]


class Slice(NamedTuple):
    """`size` indices along an axis, `step` apart, from `start` on."""

    axis: int
    start: int
    size: int
    step: int = 1


class DynamicSlice(NamedTuple):
    """`size` indices along an axis, from `start` on, which is an operand."""

    axis: int
    start: Any
    size: int


class Gather(NamedTuple):
    """Selects arbitrary indices along an axis. The axes of the indices take its place.

    - `axis`: the axis.
    - `indices`: the operand that has the indices, along with the indices of other axes:
        these are in the place `column` of its last axis.
    - `shape`: the shape of the indices in the result.
    - `mode`, `fill_value`: how to read outside of the array.
    """

    axis: int
    indices: Any
    column: int
    shape: tuple[int, ...]
    mode: lax.GatherScatterMode
    fill_value: Any


class Concatenate(NamedTuple):
    """Makes the array a part of the result: `size` indices along an axis, from `start`
    on."""

    axis: int
    start: int
    size: int


Move: TypeAlias = (
    Transpose | Reshape | Broadcast | Slice | DynamicSlice | Gather | Concatenate
)
Moves: TypeAlias = tuple[Move, ...]


def moves_of(
    eqn: JaxprEqn, place: int, operands: Sequence[Any]
) -> Sequence[Moves | None]:
    """Returns the moves that an equation applies to the operand at `place`: for each
    result, the moves that make it of the operand, in order (none, if it is the same
    array up to its dtype and placement), or `None` if it is not made by moves. Moves
    may hold some of the `operands`, which are given as they are represented."""
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return [() if i == place else None for i in range(len(eqn.outvars))]
    nothing = [None] * len(eqn.outvars)
    if name in same:
        return [()]
    if name in joining:
        found = joining[name]
        return [found.moves(eqn, place)] if heeds(found.parameters, eqn) else nothing
    if place != 0 or name not in moving or not heeds(moving[name].parameters, eqn):
        return nothing
    return moving[name].moves(eqn, operands)


def _transpose(eqn, operands):
    return [(Transpose(tuple(map(int, eqn.params["permutation"]))),)]


def _reshape(eqn, operands):
    return [(Reshape(tuple(eqn.outvars[0].aval.shape)),)]


def _broadcast(eqn, operands):
    dims = tuple(map(int, eqn.params["broadcast_dimensions"]))
    return [(Broadcast(tuple(eqn.outvars[0].aval.shape), dims),)]


def _slice(eqn, operands):
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    starts = eqn.params["start_indices"]
    steps = eqn.params["strides"] or (1,) * len(after)
    slices = [Slice(i, *each) for i, each in enumerate(zip(starts, after, steps))]
    cut = lambda s: (s.size, s.step) != (before[s.axis], 1)
    return [tuple(filter(cut, slices))]


def _dynamic_slice(eqn, operands):
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    slices = [DynamicSlice(i, *each) for i, each in enumerate(zip(operands[1:], after))]
    return [tuple(s for s in slices if s.size != before[s.axis])]


def _split(eqn, operands):
    axis, sizes = eqn.params["axis"], [int(n) for n in eqn.params["sizes"]]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return [(Slice(axis, start, n),) for start, n in zip(starts, sizes)]


def _unstack(eqn, operands):
    axis, shape = eqn.params["axis"], tuple(eqn.outvars[0].aval.shape)
    number = len(eqn.outvars)
    return [(Slice(axis, i, 1), Reshape(shape)) for i in range(number)]


def _gather(eqn, operands):
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    # Exactly one axis should be indexed, with slices of size one.
    axes = [i for i, n in enumerate(before) if sizes[i] != n]
    axes = axes or [*numbers.collapsed_slice_dims]
    if numbers.operand_batching_dims or len(axes) != 1 or sizes[axes[0]] != 1:
        return [None]
    (axis,) = axes
    collapsed = axis in numbers.collapsed_slice_dims
    if axis not in numbers.start_index_map or {*numbers.collapsed_slice_dims} - {axis}:
        return [None]
    batch = [i for i in range(len(after)) if i not in numbers.offset_dims]
    shape = tuple(after[i] for i in batch)
    move = Gather(
        axis,
        operands[1],
        numbers.start_index_map.index(axis),
        shape if collapsed else (*shape, 1),
        eqn.params["mode"],
        eqn.params["fill_value"],
    )
    # The axes of the indices now take the place of the axis. The gather may have them
    # in other places.
    offsets = iter(sorted(numbers.offset_dims))
    places = []
    for i in range(len(before)):
        places += batch if i == axis else []
        places += [] if i == axis and collapsed else [next(offsets)]
    order = tuple(places.index(i) for i in range(len(after)))
    return [(move, Transpose(order))]


def _concatenate(eqn, place):
    axis = int(eqn.params["dimension"])
    start = sum(var.aval.shape[axis] for var in eqn.invars[:place])
    return (Concatenate(axis, start, eqn.outvars[0].aval.shape[axis]),)


def _stack(eqn, place):
    axis, number = eqn.params["axis"], len(eqn.invars)
    shape = eqn.outvars[0].aval.shape
    expanded = Reshape((*shape[:axis], 1, *shape[axis + 1 :]))
    return expanded, Concatenate(axis, place, number)


# Primitives that change only the dtype or the placement of an array. Code that runs
# programs may have its own rules for them.
same = {
    *("convert_element_type", "copy", "mesh_cast", "name", "pvary"),
    *("reduce_precision", "reshard", "sharding_constraint", "stop_gradient"),
}


class Known(NamedTuple):
    """How a primitive moves numbers: a function, and the parameters of the primitive
    that it heeds, as in `add_rule`."""

    moves: Callable[..., Any]
    parameters: dict[str, Any]


def _known(moves, takes, **parameters):
    return Known(moves, any_of(takes) | parameters)


# Functions of the equation and the representations of its operands, which return moves
# for each result. (Parameters for shardings only concern the placement of the result.)
moving: dict[str, Known] = {
    "broadcast_in_dim": _known(_broadcast, "shape broadcast_dimensions sharding"),
    "dynamic_slice": _known(_dynamic_slice, "slice_sizes"),
    "gather": _known(
        _gather,
        "dimension_numbers slice_sizes unique_indices indices_are_sorted mode "
        "fill_value",
    ),
    "reshape": _known(_reshape, "new_sizes sharding", dimensions=None),
    "slice": _known(_slice, "start_indices limit_indices strides"),
    "split": _known(_split, "sizes axis"),
    "squeeze": _known(_reshape, "dimensions"),
    "transpose": _known(_transpose, "permutation"),
    "unstack": _known(_unstack, "axis"),
}

# Functions of the equation and the place of the operand, which return its moves.
joining: dict[str, Known] = {
    "concatenate": _known(_concatenate, "dimension"),
    "stack": _known(_stack, "axis"),
}

# All primitives that only move numbers.
moves: tuple[str, ...] = (*sorted(same), *moving, *joining, "optimization_barrier")
