from collections.abc import Sequence
from typing import Any, NamedTuple


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
    return View(leaf, tuple(dim_of(Factor(i, n, 1)) for i, n in enumerate(shape)))


def dim_of(factor: Factor) -> tuple[Factor, ...]:
    """The factors of an axis that consists of one."""
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
    return with_dim(view, dim, dim_of(new))


def anywhere(view: View) -> View:
    """The same view, of which it is not known where parts of axes start."""
    return view._replace(dims=tuple(tuple(map(_anywhere, dim)) for dim in view.dims))


def _anywhere(f):
    inner = None if f.inner is None else _anywhere(f.inner)
    return f._replace(start=None, inner=inner)


def with_dim(view: View, dim: int, factors: tuple[Factor, ...]) -> View:
    """The view with other factors of an axis of the value."""
    return view._replace(dims=(*view.dims[:dim], factors, *view.dims[dim + 1 :]))


def with_view(views: tuple[View, ...], new: View | None) -> tuple[View, ...]:
    """The views, and a new one if it is not `None`. A changed view may come by two
    ways: once tells all."""
    if new is None or (new.changed and any(_equal(view, new) for view in views)):
        return views
    return (*views, new)


def _equal(a, b):
    # (The indices of a program that runs are no numbers that compare.)
    a, b = anywhere(a), anywhere(b)
    same = a._replace(at=()) == b._replace(at=()) and len(a.at) == len(b.at)
    return same and all(
        i.factor == j.factor and i.value is j.value for i, j in zip(a.at, b.at)
    )


def joint(branches: Sequence[tuple[View, ...]]) -> tuple[View, ...] | None:
    """The views that a result of several branches is; `None` if they differ. (An index
    that was chosen in a branch is not known outside.)"""
    first, *rest = branches
    if any(view.at for views in branches for view in views):
        return None
    if all(views == first for views in rest):
        return first
    first, *rest = (tuple(map(anywhere, views)) for views in branches)
    return first if all(views == first for views in rest) else None
