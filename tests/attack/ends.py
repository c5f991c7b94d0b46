"""What a program does with an array in the end: products, linear in `x`."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .case import Case


class End(NamedTuple):
    """`fn(x, w)`, for an `x` of this shape. `None` in the place of a shape if there is
    no `x`."""

    name: str
    fn: Callable[[Any, Any], Any]
    x_shape: tuple[int, ...] | None


def _identity(case: Case, shape) -> End:
    return End("itself", lambda x, w: w, None)


def _dot_general(case: Case, shape) -> End:
    axes = [int(i) for i in case.rng.permutation(len(shape))]
    number = case.integer(1, len(shape))
    batch = axes[number:][: case.integer(0, 1)]
    contracted = axes[:number] if case.chance(0.3) else axes[:1]
    free = [case.integer(1, 4) for _ in range(case.integer(0, 2))]
    sizes = [shape[i] for i in (*contracted, *batch)] + free
    order = [int(i) for i in case.rng.permutation(len(sizes))]
    place = [order.index(i) for i in range(len(sizes))]
    number = len(contracted)
    of_x = tuple(place[:number]), tuple(place[number : number + len(batch)])
    of_w = tuple(contracted), tuple(batch)
    first = case.chance(0.3)

    def fn(x, w):
        if first:
            numbers = (of_w[0], of_x[0]), (of_w[1], of_x[1])
            return lax.dot_general(w, x, numbers)
        numbers = (of_x[0], of_w[0]), (of_x[1], of_w[1])
        return lax.dot_general(x, w, numbers)

    return End("dot_general", fn, tuple(sizes[i] for i in order))


def _einsum(case: Case, shape) -> End:
    letters = "abcdef"[: len(shape)]
    kept = "".join(c for c in letters if case.chance(0.6))
    of_x = [*letters, "x"] if case.chance(0.3) else [*letters[-1], "x"]
    of_x = "".join(of_x[int(i)] for i in case.rng.permutation(len(of_x)))
    out = [*kept, "x"]
    out = "".join(out[int(i)] for i in case.rng.permutation(len(out)))
    sizes = dict(zip(letters, shape), x=case.integer(1, 5))
    return End(
        "einsum",
        lambda x, w: jnp.einsum(f"{of_x},{letters}->{out}", x, w),
        tuple(sizes[c] for c in of_x),
    )


def _matmul(case: Case, shape) -> End | None:
    if len(shape) < 2:
        return None
    rows = case.integer(1, 4)
    if case.chance(0.5):
        return End("matmul", lambda x, w: x @ w, (*shape[:-2], rows, shape[-2]))
    return End("matmul", lambda x, w: w @ x, (*shape[:-2], shape[-1], rows))


def _vmapped(case: Case, shape) -> End | None:
    if len(shape) < 2 or 0 in shape:
        return None
    i = case.integer(0, len(shape) - 1)
    rest = (*shape[:i], *shape[i + 1 :])
    fn = lambda x, w: jnp.tensordot(x, w, (0, 0))
    return End(
        "vmap",
        lambda x, w: jax.vmap(fn, (0, i))(x, w),
        (shape[i], rest[0], case.integer(1, 3)),
    )


def _scanned(case: Case, shape) -> End | None:
    if len(shape) < 3 or shape[0] == 0:
        return None

    def fn(x, w):
        return lax.scan(lambda c, w: (c, jnp.tensordot(x, w, (0, 0))), 0, w)[1]

    return End("scan", fn, (shape[1], case.integer(1, 3)))


def _looped(case: Case, shape) -> End | None:
    if len(shape) < 3 or shape[0] == 0:
        return None

    def fn(x, w):
        step = lambda i, y: y + jnp.tensordot(x, w[i], (0, 0))
        y = jnp.tensordot(x, w[0], (0, 0))
        return lax.fori_loop(0, shape[0], step, y)

    return End("fori_loop", fn, (shape[1], case.integer(1, 3)))


def _ragged(case: Case, shape) -> End | None:
    if len(shape) != 3 or 0 in shape:
        return None
    most = case.pick((3, 3, 20))
    counts = [case.integer(0, most) for _ in range(shape[0])]
    # Fewer or more rows than the sizes sum up to.
    rows = max(1, sum(counts) + case.pick((0, 0, -case.integer(1, 10), 5)))
    sizes = jnp.asarray(counts, jnp.int32)
    way = case.pick(("plain", "plain", "general", "contracted", "batch"))
    first = case.chance(0.5)
    dots, ragged, group, x_shape = {
        # Along rows of `x`, which is transposed or not, times `w` or its transpose.
        "plain": (((1,), (1,)), 0, (0,), (rows, shape[1])),
        "general": (
            ((int(not first),), (case.integer(1, 2),)),
            int(first),
            (0,),
            None,
        ),
        # Sums over the parts of an axis, and parts of a batch.
        "contracted": (((0,), (0,)), 0, (), (shape[0], rows)),
        "batch": (((1,), (1,)), 0, (), (shape[0], shape[1], 3)),
    }[way]
    batch = ((0,), (0,)) if way == "batch" else ((), ())
    if x_shape is None:
        contracted = shape[dots[1][0]]
        x_shape = (contracted, rows) if dots[0] == (0,) else (rows, contracted)
    numbers = lax.RaggedDotDimensionNumbers((dots, batch), (ragged,), group)

    def fn(x, w):
        if way == "plain":
            return lax.ragged_dot(x, w, sizes)
        return lax.ragged_dot_general(x, w, sizes, numbers)

    name = "ragged_dot" if group else f"ragged_dot, {way}"
    return End(name, fn, x_shape)


def _conv(case: Case, shape) -> End | None:
    if len(shape) not in (3, 4) or math.prod(shape) == 0:
        return None
    spatial = len(shape) - 2
    numbers = ("NCHW"[: 2 + spatial], "OIHW"[: 2 + spatial], "NCHW"[: 2 + spatial])
    groups = case.pick([g for g in (1, 2, 4) if shape[0] % g == 0])
    params: dict[str, Any] = dict(
        window_strides=(case.integer(1, 2),) * spatial,
        padding=case.pick(("SAME", "VALID", ((1, 2),) * spatial)),
        rhs_dilation=(case.integer(1, 2),) * spatial,
        dimension_numbers=numbers,
        feature_group_count=groups,
    )
    sizes = [2 * s + case.integer(0, 3) for s in shape[2:]]
    x_shape = (case.integer(1, 2), shape[1] * groups, *sizes)
    if math.prod(x_shape) > 2**17:
        return None
    fn = lambda x, w: lax.conv_general_dilated(x, w, **params)
    return End("conv", fn, x_shape)


ends = (_identity, _dot_general, _dot_general, _einsum, _einsum, _matmul, _vmapped)
ends += (_scanned, _looped, _ragged, _conv)


def draw_end(case: Case, shape: tuple[int, ...]) -> End:
    """For an array of this shape."""
    found = case.pick(ends)(case, shape) if shape else None
    if found is None or math.prod(found.x_shape or ()) > 2**18:
        return _identity(case, shape)
    return found
