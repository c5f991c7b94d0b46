import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import JaxprEqn


# What a value of a program is, if its numbers are those of one of the program's
# operands: which axes of the leaf each of its axes consists of.


class Factor(NamedTuple):
    """A part of an axis of a leaf: `size` indices, `stride` apart, of which the first
    is `start`; `None` if that is not known. `axis` is negative for what is no axis of
    the leaf: `repeated`, `joined` or `picked`. Of what is `joined`, the indices from
    `start` on are the leaf's, and those of `inner`; `None` if that is not known."""

    axis: int
    size: int
    stride: int
    start: int | None = 0
    inner: "Factor | None" = None


repeated = -1  # a broadcast: the same numbers again
joined = -2  # a concatenation, in which the leaf is one part
picked = -3  # a gather, in which each index chose its own part of the leaf


class Index(NamedTuple):
    """A choice along an axis of a leaf, or a part of one.

    - `value`: the index, of a gather in an array with one index for each of several
        axes, of which this is in the place `column`.
    - `many`: whether there is one for each index along the axes that are `picked`.
    """

    factor: Factor
    value: Any
    column: int = 0
    many: bool = False


class View(NamedTuple):
    """A leaf, but for the order of its axes, splits, merges, and choices along some.

    - `leaf`: the number of the leaf.
    - `dims`: for each axis of the value, the factors that it consists of, the outermost
        first.
    - `at`: the indices that were chosen along other axes.
    - `changed`: whether the numbers are no longer those of the leaf, but each is a
        function of one of them.
    """

    leaf: int
    dims: tuple[tuple[Factor, ...], ...]
    at: tuple[Index, ...] = ()
    changed: bool = False


def whole(leaf: int, shape: Sequence[int]) -> View:
    """The view of a leaf that is the leaf itself."""
    return View(leaf, tuple(_dim(Factor(i, n, 1)) for i, n in enumerate(shape)))


def _dim(factor):
    return () if factor.size == 1 else (factor,)


def merged(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """The same factors, in which neighbours that make up one are one."""
    out: list[Factor] = []
    for f in factors:
        if out and out[-1].axis == f.axis and out[-1].stride == f.size * f.stride:
            before = out.pop()
            start = _sum(before.start, f.start)
            f = Factor(f.axis, before.size * f.size, f.stride, start)
        out.append(f)
    return tuple(out)


def _sum(a, b):
    return None if a is None or b is None else a + b


def reshaped(view: View, shape: Sequence[int]) -> View | None:
    """The view in another shape. `None` if the new axes cut across the factors."""
    todo = [f for dim in view.dims for f in dim][::-1]
    dims = []
    for n in map(int, shape):
        dim = []
        while n > 1:
            if not todo:
                return None
            f = todo.pop()
            if n % f.size != 0:
                if f.size % n != 0:
                    return None
                inner = f.size // n
                todo.append(Factor(f.axis, inner, f.stride))
                f = Factor(f.axis, n, f.stride * inner, f.start)
            dim.append(f)
            n //= f.size
        dims.append(merged(dim))
    return None if todo else view._replace(dims=tuple(dims))


def chosen(view: View, dim: int, index: Any) -> View | None:
    """The view at an index along an axis of the value, which goes. `None` if that is a
    part of an axis of the leaf."""
    rest = (*view.dims[:dim], *view.dims[dim + 1 :])
    factors = [f for f in view.dims[dim] if f.axis != repeated]
    if not factors:
        return view._replace(dims=rest)
    if len(view.dims[dim]) != 1 or factors[0].axis < 0:
        return None
    (factor,) = factors
    return view._replace(dims=rest, at=(*view.at, Index(factor, index)))


def part(
    view: View, dim: int, size: int, start: int | None, step: int = 1
) -> View | None:
    """The view of some of the indices along an axis of the value: `size` of them,
    `step` apart, from `start` on, if that is known."""
    factors = view.dims[dim]
    if len(factors) != 1 or factors[0].axis in (joined, picked):
        return None
    (f,) = factors
    rest = (*view.dims[:dim], *view.dims[dim + 1 :])
    if size == 1 and any(f.axis == other.axis for each in rest for other in each):
        # Of an axis in several parts, it tells which of the others are left.
        view = view._replace(at=(*view.at, Index(f, start)))
    first = None if start is None else start * f.stride
    new = Factor(f.axis, size, f.stride * step, _sum(f.start, first))
    return _with_dim(view, dim, _dim(new))


def anywhere(view: View) -> View:
    """The same view, of which it is not known where parts of axes start."""
    return view._replace(dims=tuple(tuple(map(_anywhere, dim)) for dim in view.dims))


def _anywhere(f):
    inner = None if f.inner is None else _anywhere(f.inner)
    return f._replace(start=None, inner=inner)


def _with_dim(view, dim, factors):
    return view._replace(dims=(*view.dims[:dim], factors, *view.dims[dim + 1 :]))


_same = {
    "convert_element_type",
    "copy",
    "copy_p",
    "name",
    "pcast",
    "pvary",
    "reduce_precision",
    "sharding_constraint",
    "mesh_cast",
    "reshard",
    "stop_gradient",
}


def follow(
    eqn: JaxprEqn, place: int, view: View, shape: Sequence[int], operands: Sequence[Any]
) -> Sequence[View | None]:
    """What the results of an equation are, if one of its operands is a view.

    **Arguments:**

    - `eqn`: the equation.
    - `place`: which operand is the view.
    - `view`: the view.
    - `shape`: the shape of the leaf.
    - `operands`: the values of all operands, of which the view keeps some as indices.

    **Returns:**

    A view for each result, or `None` for what is no view any more.
    """
    name, params = eqn.primitive.name, eqn.params
    outs: list[Any] = [var.aval for var in eqn.outvars]
    lost = [None] * len(outs)
    if name == "optimization_barrier":
        return [view if i == place else None for i in range(len(outs))]
    if name in _same:
        return [view]
    if name == "concatenate":
        axis = params["dimension"]
        given: list[Any] = [var.aval for var in eqn.invars[:place]]
        start = sum(aval.shape[axis] for aval in given)
        of = view.dims[axis]
        inner = of[0] if len(of) == 1 and of[0].axis >= 0 else None
        joint = Factor(joined, outs[0].shape[axis], 0, start, inner)
        return [_with_dim(view, axis, _dim(joint))]
    if name == "stack":
        axis, joint = params["axis"], Factor(joined, len(eqn.invars), 0, place)
        dims = (*view.dims[:axis], _dim(joint), *view.dims[axis:])
        return [view._replace(dims=dims)]
    if place != 0:
        return lost
    if name == "transpose":
        dims = tuple(view.dims[int(i)] for i in params["permutation"])
        return [view._replace(dims=dims)]
    if name in ("reshape", "squeeze", "expand_dims"):
        plain = name != "reshape" or params["dimensions"] is None
        return [reshaped(view, outs[0].shape) if plain else None]
    if name == "broadcast_in_dim":
        return [_broadcast(view, eqn)]
    if name == "slice":
        steps = params["strides"] or (1,) * len(outs[0].shape)
        starts = params["start_indices"]
        return [_sliced(view, eqn, starts, steps, shape, starts)]
    if name == "dynamic_slice":
        steps = (1,) * len(outs[0].shape)
        unknown = (None,) * len(steps)
        return [_enough(_sliced(view, eqn, operands[1:], steps, shape, unknown))]
    if name == "split":
        sizes = [int(n) for n in params["sizes"]]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        axis = params["axis"]
        return [part(view, axis, n, start) for n, start in zip(sizes, starts)]
    if name == "unstack":
        return [chosen(view, params["axis"], i) for i in range(len(outs))]
    if name == "gather":
        return [_gathered(view, eqn, operands, shape)]
    return lost


def _broadcast(view, eqn):
    shape = eqn.outvars[0].aval.shape
    dims = [_dim(Factor(repeated, n, 0)) for n in shape]
    before = eqn.invars[0].aval.shape
    for i, j in enumerate(eqn.params["broadcast_dimensions"]):
        if before[i] == shape[int(j)]:
            dims[int(j)] = view.dims[i]
    return view._replace(dims=tuple(dims))


def _sliced(view, eqn, starts, steps, shape, known):
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    for i, (n, start, step) in enumerate(zip(after, starts, steps, strict=True)):
        if n == before[i] and step == 1:
            continue
        factors = view.dims[i]
        covers = len(factors) == 1 and factors[0].axis >= 0
        if n == 1 and covers and factors[0].size == shape[factors[0].axis]:
            found = chosen(view, i, start)
            if found is not None:
                dims = (*found.dims[:i], (), *found.dims[i:])
                found = found._replace(dims=dims)
        else:
            found = part(view, i, n, known[i], step)
        if found is None:
            return None
        view = found
    return view


# Of a matrix, an index chooses a row of a table. Of a stack, it chooses a matrix.
def _enough(view):
    if view is None or not view.at:
        return view
    left = {f.axis for dim in view.dims for f in dim if f.axis >= 0}
    return view if len(left) >= 2 else None


def _gathered(view, eqn, operands, shape):
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    parts = [i for i, n in enumerate(before) if sizes[i] != n]
    parts = parts or [*numbers.collapsed_slice_dims]
    if numbers.operand_batching_dims or len(parts) != 1 or sizes[parts[0]] != 1:
        return None
    (axis,) = parts
    found = _enough(chosen(view, axis, operands[1]))
    if found is None:
        return None
    rest = [*found.dims]
    if axis not in numbers.collapsed_slice_dims:
        rest.insert(axis, ())
    batch = [i for i in range(len(after)) if i not in numbers.offset_dims]
    indices = math.prod(after[i] for i in batch)
    kind, stride = repeated, 0
    if len(found.at) > len(view.at):
        *at, last = found.at
        column, many = numbers.start_index_map.index(axis), indices > 1
        found = found._replace(at=(*at, last._replace(column=column, many=many)))
        if many:
            if any(i.many for i in at) or last.factor.size != shape[last.factor.axis]:
                return None
            kind, stride = picked, indices
    dims = []
    for i, n in enumerate(after):
        stride //= n if i in batch else 1
        dims.append(_dim(Factor(kind, n, stride)) if i in batch else rest.pop(0))
    return found._replace(dims=tuple(dims))


# Each number of the result depends on that in the same place of each operand.
_elementwise = {
    *("abs", "add", "add_any", "and", "atan2", "ceil", "clamp", "complex", "cos"),
    *("cosh", "div", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "imag"),
    *("integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow"),
    *("real", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt"),
    *("square", "sub", "tan", "tanh"),
}


def changed(eqn: JaxprEqn, place: int, view: View) -> View | None:
    """The view whose numbers an equation changes one by one; `None` if it does
    otherwise, or if these are no numbers, but a mask."""
    given: Any = eqn.invars[place].aval
    elementwise = eqn.primitive.name in _elementwise and given.dtype != bool
    out: Any = eqn.outvars[0].aval
    shape = out.shape if elementwise else ()
    if not elementwise or len(shape) != len(view.dims):
        return None
    sizes = [math.prod(f.size for f in dim) for dim in view.dims]
    return view._replace(changed=True) if list(shape) == sizes else None
