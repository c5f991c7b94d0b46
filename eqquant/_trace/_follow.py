import math
from collections.abc import Sequence
from typing import Any

from jax.extend.core import JaxprEqn

from .._implicit import (
    Broadcast,
    Concatenate,
    DynamicSlice,
    Gather,
    moves_of,
    Reshape,
    Slice,
    Transpose,
)
from ._view import (
    chosen,
    dim_of,
    Factor,
    joined,
    part,
    picked,
    repeated,
    reshaped,
    View,
    with_dim,
)


def follow(
    eqn: JaxprEqn, place: int, view: View, shape: Sequence[int], operands: Sequence[Any]
) -> Sequence[View | None]:
    """Returns the views of the results of an equation whose operand at `place` is a
    view of a leaf of this `shape`: a view for each result, or `None` for a result that
    is not a view. Views keep some of the values of all `operands` as indices."""

    def result(moves, var):
        # (An array without numbers holds none of the leaf's.)
        if moves is None or 0 in shape or 0 in var.aval.shape:
            return None
        return _moved(view, moves, shape)

    return list(map(result, moves_of(eqn, place, operands), eqn.outvars))


def _moved(view, moves, shape):
    for move in moves:
        view = _rules[type(move)](view, move, shape)
        if view is None:
            break
    return view


def _transpose(view, move, shape):
    return view._replace(dims=tuple(view.dims[i] for i in move.order))


def _reshape(view, move, shape):
    return reshaped(view, move.shape)


def _broadcast(view, move, shape):
    dims = [dim_of(Factor(repeated, n, 0)) for n in move.shape]
    for dim, i in zip(view.dims, move.dims, strict=True):
        if _size(dim) == move.shape[i]:
            dims[i] = dim
    return view._replace(dims=tuple(dims))


def _slice(view, move, shape):
    axis, start, size, step = move
    if size == 1 and _is_whole(view.dims[axis], shape):
        return _chosen(view, axis, start)
    return part(view, axis, size, start, step)


def _dynamic_slice(view, move, shape):
    axis, start, size = move
    if size == 1 and _is_whole(view.dims[axis], shape):
        return _enough(_chosen(view, axis, start))
    return _enough(part(view, axis, size, None))


def _gather(view, move, shape):
    found = _enough(chosen(view, move.axis, move.indices))
    if found is None:
        return None
    number = math.prod(move.shape)
    kind, stride = repeated, 0
    if len(found.at) > len(view.at):
        *at, last = found.at
        many = number > 1
        last = last._replace(column=move.column, many=many)
        found = found._replace(at=(*at, last))
        if many:
            if any(i.many for i in at) or last.factor.size != shape[last.factor.axis]:
                return None
            kind, stride = picked, number
    dims = []
    for n in move.shape:
        stride //= n
        dims.append(dim_of(Factor(kind, n, stride)))
    before, after = found.dims[: move.axis], found.dims[move.axis :]
    return found._replace(dims=(*before, *dims, *after))


def _concatenate(view, move, shape):
    axis, start, size = move
    of = view.dims[axis]
    inner = of[0] if len(of) == 1 and of[0].axis >= 0 else None
    return with_dim(view, axis, dim_of(Factor(joined, size, 0, start, inner)))


_rules = {
    Broadcast: _broadcast,
    Concatenate: _concatenate,
    DynamicSlice: _dynamic_slice,
    Gather: _gather,
    Reshape: _reshape,
    Slice: _slice,
    Transpose: _transpose,
}


def _size(dim):
    return math.prod(f.size for f in dim)


def _is_whole(dim, shape):
    return len(dim) == 1 and dim[0].axis >= 0 and dim[0].size == shape[dim[0].axis]


def _chosen(view, axis, index):
    # The view at one index along a whole axis, which stays with size one.
    found = chosen(view, axis, index)
    assert found is not None
    dims = (*found.dims[:axis], (), *found.dims[axis:])
    return found._replace(dims=dims)


# An index into a matrix looks up a row of a table. An index into a stack chooses a
# matrix, which can enter a product.
def _enough(view):
    if view is None or not view.at:
        return view
    left = {f.axis for dim in view.dims for f in dim if f.axis >= 0}
    return view if len(left) >= 2 else None


# Each number of the result depends only on the numbers in the same place of the
# operands.
_elementwise = {
    *("abs", "add", "add_any", "and", "atan2", "ceil", "clamp", "complex", "cos"),
    *("cosh", "div", "erf", "erf_inv", "exp", "exp2", "expm1", "floor", "imag"),
    *("integer_pow", "log", "log1p", "logistic", "max", "min", "mul", "neg", "pow"),
    *("real", "rem", "round", "rsqrt", "select_n", "sign", "sin", "sinh", "sqrt"),
    *("square", "sub", "tan", "tanh"),
}


def changed(eqn: JaxprEqn, place: int, view: View) -> View | None:
    """Returns the view after an elementwise equation has changed its numbers. `None`
    if the equation is not elementwise, or if the view is a boolean mask."""
    given: Any = eqn.invars[place].aval
    elementwise = eqn.primitive.name in _elementwise and given.dtype != bool
    out: Any = eqn.outvars[0].aval
    shape = out.shape if elementwise else ()
    if not elementwise or len(shape) != len(view.dims):
        return None
    same = list(shape) == [*map(_size, view.dims)]
    return view._replace(changed=True) if same else None
