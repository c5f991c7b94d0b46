from collections.abc import Sequence
from typing import Any, NamedTuple


# A view describes a value of a program whose numbers are an operand's (the leaf's): it
# has the axes of the leaf that make up each axis of the value.


class Factor(NamedTuple):
    """A part of an axis of a leaf: `size` indices, `stride` apart, from `start` on;
    `start` is `None` if it is unknown. `axis` is negative if it is not an axis of the
    leaf: `repeated`, `joined` or `picked`. Of a `joined` axis, the indices from `start`
    on belong to the leaf, and `inner` describes them; `None` if they are unknown."""

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

    - `value`: the index. A gather takes an array with an index for each of several
        axes, and this one is in the place `column`.
    - `many`: whether there is one for each index along the `picked` axes.
    """

    factor: Factor
    value: Any
    column: int = 0
    many: bool = False


class View(NamedTuple):
    """A leaf up to the order of its axes, splits, merges, and choices along axes.

    - `leaf`: the number of the leaf.
    - `dims`: for each axis of the value, the factors that it consists of, the outermost
        first.
    - `at`: the indices that were chosen along other axes.
    - `changed`: whether the numbers have changed, each to a function of one number of
        the leaf.
    """

    leaf: int
    dims: tuple[tuple[Factor, ...], ...]
    at: tuple[Index, ...] = ()
    changed: bool = False


def whole(leaf: int, shape: Sequence[int]) -> View:
    """Returns the view of a leaf as it is."""
    return View(leaf, tuple(dim_of(Factor(i, n, 1)) for i, n in enumerate(shape)))


def dim_of(factor: Factor) -> tuple[Factor, ...]:
    """Returns the factors of an axis that consists of one factor."""
    return () if factor.size == 1 else (factor,)


def merged(factors: Sequence[Factor]) -> tuple[Factor, ...]:
    """Returns the factors, with neighbours merged where they make up one factor."""
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
    """Returns the view in another shape, or `None` if the new axes split factors."""
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
    """Returns the view at an index along an axis of the value, which is removed. `None`
    if the axis is a part of an axis of the leaf."""
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
    """Returns the view of some indices along an axis of the value: `size` of them,
    `step` apart, from `start` on, which is `None` if unknown."""
    factors = view.dims[dim]
    if len(factors) != 1 or factors[0].axis in (joined, picked):
        return None
    (f,) = factors
    rest = (*view.dims[:dim], *view.dims[dim + 1 :])
    if size == 1 and any(f.axis == other.axis for each in rest for other in each):
        # If the axis has several parts, the index determines the others that are left.
        view = view._replace(at=(*view.at, Index(f, start)))
    first = None if start is None else start * f.stride
    new = Factor(f.axis, size, f.stride * step, _sum(f.start, first))
    return with_dim(view, dim, dim_of(new))


def anywhere(view: View) -> View:
    """Returns the view with unknown starts of parts of axes."""
    return view._replace(dims=tuple(tuple(map(_anywhere, dim)) for dim in view.dims))


def _anywhere(f):
    inner = None if f.inner is None else _anywhere(f.inner)
    return f._replace(start=None, inner=inner)


def with_dim(view: View, dim: int, factors: tuple[Factor, ...]) -> View:
    """Returns the view with other factors for an axis of the value."""
    return view._replace(dims=(*view.dims[:dim], factors, *view.dims[dim + 1 :]))


def with_view(views: tuple[View, ...], new: View | None) -> tuple[View, ...]:
    """Adds a view unless it is `None`, or changed and already present."""
    if new is None or (new.changed and any(_equal(view, new) for view in views)):
        return views
    return (*views, new)


def _equal(a, b):
    # (Indices of a running program are tracers, which do not compare.)
    a, b = anywhere(a), anywhere(b)
    same = a._replace(at=()) == b._replace(at=()) and len(a.at) == len(b.at)
    return same and all(
        i.factor == j.factor and i.value is j.value for i, j in zip(a.at, b.at)
    )


def joint(branches: Sequence[tuple[View, ...]]) -> tuple[View, ...] | None:
    """Returns the views of a result of several branches; `None` if they differ. (An
    index that was chosen inside a branch is unknown outside.)"""
    first, *rest = branches
    if any(view.at for views in branches for view in views):
        return None
    if all(views == first for views in rest):
        return first
    first, *rest = (tuple(map(anywhere, views)) for views in branches)
    return first if all(views == first for views in rest) else None
