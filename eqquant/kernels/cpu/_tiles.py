import functools as ft
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Integer

from ...formats import Stored
from .._problem import Problem
from ._xla import fuses


# Products of many rows, by tiles of the weight: some columns of the weight are decoded,
# and multiplied by all inputs, before the next. In a product across the blocks, a tile
# is some bytes of all columns.
#
# The tiles are unrolled, and kept in order by optimization barriers. In a loop, XLA
# would decode on one thread. (Before JAX 0.11 there is a loop: without one, XLA would
# decode all tiles at once.)
_most_tiles = 20
_least_bytes = 2**19


def tiled(
    x: Array,
    codes: Integer[Array, "j n"],
    decode: Callable[[Integer[Array, "_ _"], Callable[[Array], Array]], Array],
    problem: Problem,
    p: int,
    finish: Callable[[Array], Array] = lambda y: y,
) -> Array:
    """`x[m, k] @ w[k, n]`, or `x[m, n] @ w[k, n].T`, where each byte has `p` codes.

    - `decode`: called as `decode(bytes, part)`, returns a tile of `w`. `part(a)` is the
        same tile of an array `a` with one row for each code.
    - `finish`: applied to the product of each tile.
    """
    j, n = codes.shape
    forward = problem.product == "matmul"
    if forward:
        x = jnp.pad(x, ((0, 0), (0, p * j - x.shape[1])))
    number = number_of_tiles(n * p * j * problem.stack, x.dtype.itemsize)
    if p == 1 and x.dtype == codes.dtype:
        number = 1  # The codes are multiplied directly.
    length = n if forward else j

    def tile(codes, start, size):
        def some(a, each):
            if size == length:
                return a
            axis, each = (1, 1) if forward else (0, each)
            return lax.dynamic_slice_in_dim(a, start * each, size * each, axis)

        w = decode(some(codes, 1), lambda a: some(a, p))
        return finish(dot(x, w, 0 if forward else 1))

    y = _side_by_side(tile, codes, length, -(-length // number))
    return y if forward else y[:, : problem.k]


def number_of_tiles(size: int, itemsize: int) -> int:
    """Returns the number of tiles in which a weight of this size is multiplied."""
    # A tile takes a byte for every 8 elements of the weight, which is a 32nd of the
    # weight in float32, but at least half a megabyte.
    number = -(-size * itemsize // max(_least_bytes, size // 8))
    return min(_most_tiles, number)


def after(stored: Stored, part: Float[Array, "_ _"]) -> tuple[Stored, Array]:
    """Returns the stored arrays, for computations after `part`; and `part`."""
    if fuses:
        return lax.optimization_barrier((stored, part))
    # XLA drops barriers before it schedules. So this adds a zero that XLA cannot
    # recognize. (LLVM can.)
    bits = lax.bitcast_convert_type(part[0, 0], jnp.uint32)
    zero = (bits >> np.uint32(31)) >> np.uint32(1)
    return {n: a + zero.astype(a.dtype) for n, a in stored.items()}, part


def _side_by_side(tile, codes, length, size):
    # The tiles have one size, except for the last. One of them is in memory at a time.
    number, rest = divmod(length, size)
    if number == 1 and rest == 0:
        return tile(codes, 0, size)
    parts = []
    if fuses:
        for i in range(number):
            parts.append(tile(codes, i * size, size))
            codes, parts[-1] = lax.optimization_barrier((codes, parts[-1]))
    else:

        def step(i, y):
            new = tile(codes, i * size, size)
            return lax.dynamic_update_slice_in_dim(y, new, i * new.shape[-1], axis=-1)

        shape = jax.eval_shape(ft.partial(tile, start=0, size=size), codes)
        y_shape = (*shape.shape[:-1], number * shape.shape[-1])
        y = lax.full_like(codes, 0, shape.dtype, y_shape)
        parts.append(lax.fori_loop(0, number, step, y))
    if rest > 0:
        parts.append(tile(codes, number * size, rest))
    return jnp.concatenate(parts, axis=-1)


def dot(x: Array, w: Array, axis: int) -> Array:
    """Contracts the last axis of `x` with an axis of `w`, in float32 or, for 8-bit
    integers, in 32-bit integers."""
    integers = jnp.issubdtype(x.dtype, jnp.integer)
    return lax.dot_general(
        x,
        w,
        (((1,), (axis,)), ((), ())),
        precision=lax.Precision.HIGHEST if x.dtype == jnp.float32 else None,
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )


# The least size of blocks whose composite scales fit in the memory that a product may
# take if XLA copies all scales, as it does before JAX 0.11.
_composite_block = 64


def refuse_copied_scales(problem: Problem) -> str | None:
    """Returns why many rows are not multiplied by tiles of a composite format, or
    `None`."""
    if fuses or not problem.composite:
        return None
    size = problem.format.block_size or problem.k
    if size < _composite_block and problem.rows not in range(32):
        return f"needs JAX 0.11 for composite scales of blocks of {size}"
    return None


# The least number of elements of a weight for which inputs are rounded: products with
# smaller weights take little time, and are exact.
_rounding_size = 2**18


def refuse_small(problem: Problem) -> str | None:
    """Returns why no kernel that rounds its inputs applies to a small weight, or
    `None`."""
    size = problem.n * problem.k
    if size < _rounding_size:
        return f"is for weights of {_rounding_size} numbers or more, got {size}"
    return None
