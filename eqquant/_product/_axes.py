import math
from typing import Any, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Shaped

from ._in_rows import in_rows


# The contracted axis or axes, counted from the end and ascending. They stay right when
# axes in front of them are added or removed.
Axis: TypeAlias = int | tuple[int, ...]


def normalise_axis(axis: Axis | None, shape: tuple[int, ...]) -> Axis:
    """`axis`, counted from the end. By default -2, for `x @ w`, or -1 for a vector.
    Raises a `TypeError` if it is not made of integers. Raises a `ValueError` if an axis
    is out of range or repeated."""
    ndim = len(shape)
    if axis is None:
        axis = -2 if ndim > 1 else -1
    axes = as_tuple(as_integers(axis))
    for i in axes:
        if not -ndim <= i < ndim:
            raise ValueError(
                f"`axis` should be between {-ndim} and {ndim - 1} for an array of "
                f"shape {shape}. Got {axis}."
            )
    axes = sorted(i - ndim if i >= 0 else i for i in axes)
    if len(axes) == 0 or len(set(axes)) != len(axes):
        raise ValueError(
            f"`axis` should name at least one axis, and none twice. Got {axis}."
        )
    return axes[0] if len(axes) == 1 else tuple(axes)


def as_integers(axis: Any) -> Axis:
    """Returns `axis` in Python's integers. Raises a `TypeError` if it is not made of
    integers, of Python or NumPy."""
    for i in as_tuple(axis):
        if isinstance(i, bool) or not isinstance(i, int | np.integer):
            raise TypeError(
                f"`axis` should be an integer or a tuple of integers. Got {axis!r}."
            )
    return tuple(map(int, axis)) if isinstance(axis, tuple) else int(axis)


def as_tuple(axis: Axis) -> tuple[int, ...]:
    return axis if isinstance(axis, tuple) else (axis,)


def contracted_last(w: Shaped[Array, "..."], axis: Axis) -> Shaped[Array, "*b k"]:
    """Moves the contracted axes to the end, in memory too, and merges them into one."""
    axes = as_tuple(axis)
    last = tuple(range(-len(axes), 0))
    if axes != last:
        w = in_rows(jnp.moveaxis(w, axes, last))
    lead = w.shape[: w.ndim - len(axes)]
    return w.reshape(*lead, math.prod(w.shape[w.ndim - len(axes) :]))


def contracted_back(
    w: Shaped[Array, "*b k"], axis: Axis, inner: tuple[int, ...]
) -> Shaped[Array, "..."]:
    """The inverse of `contracted_last`. `inner` holds the sizes of all contracted axes
    but the first, whose size follows from `k`."""
    axes = as_tuple(axis)
    *lead, k = w.shape
    w = w.reshape(*lead, k // max(1, math.prod(inner)), *inner)
    return jnp.moveaxis(w, range(-len(axes), 0), axes)


def logical(row: tuple, axis: Axis, contracted: tuple) -> tuple:
    """Converts a tuple with one entry for each axis of `*b k` to one entry for each
    logical axis. `contracted` holds the entries of the contracted axes."""
    axes = as_tuple(axis)
    ndim = len(row) - 1 + len(axes)
    entries = dict(zip([ndim + i for i in axes], contracted))
    rest = iter(row[:-1])
    return tuple(entries[i] if i in entries else next(rest) for i in range(ndim))
