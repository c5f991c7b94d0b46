import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Inexact, Integer, Shaped

from .._array import as_mapped, leading_axes, matmul, QuantizedArray, undeclared


def ragged_dot(
    x: Shaped[Array, "m k"],
    q: QuantizedArray,
    group_sizes: Integer[Array, " g"],
    *,
    transposed: bool,
    dtype: Any,
    precision: str | None,
) -> Inexact[Array, "m n"] | None:
    """`lax.ragged_dot`: multiplies the first `group_sizes[0]` rows of `x` by the first
    weight of `q[g, k, n]` (of `q[g, n, k]` if `transposed`), the next rows by the
    second, and so on. `None` if blocks lie along the axis `g`.

    It scans over pairs of a tile of rows and a weight that some of its rows need. So
    one weight is read at a time, and unneeded ones are not read at all.
    """
    q = as_mapped(q)
    number = q.shape[0]
    if 0 not in leading_axes(q) or q.ndim != 3 or number == 0 or x.shape[0] == 0:
        return None
    return _scanned(x, q, group_sizes, transposed, dtype, precision)


# Jitted so that eager calls compile once for each shape.
@ft.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _scanned(x, q, group_sizes, transposed, dtype, precision):
    m, number = x.shape[0], q.shape[0]
    size = min(m, _tile(m, number))
    tiles = -(-m // size)
    x = jnp.pad(x.astype(dtype), ((0, tiles * size - m), (0, 0)))

    # (Narrow integers could not count up to `m`.)
    if group_sizes.dtype.itemsize < 4:
        group_sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first = starts // size
    # The number of tiles that each weight is needed for.
    tiles_of = jnp.where(group_sizes > 0, (ends - 1) // size - first + 1, 0)
    upto = jnp.cumsum(tiles_of)

    @jax.checkpoint
    def part(i, x, q):
        # The weight and the tile of step `i`. (Steps from `upto[-1]` on do nothing.)
        which = jnp.minimum(jnp.sum(upto <= i), number - 1)
        start = (first[which] + i - (upto[which] - tiles_of[which])) * size
        row = start + jnp.arange(size, dtype=start.dtype)
        mine = (row >= starts[which]) & (row < ends[which]) & (i < upto[-1])
        pick = lambda a: lax.dynamic_index_in_dim(a, which, keepdims=False)
        w = undeclared(q, stored=jtu.tree_map(pick, q.stored))
        rows = lax.dynamic_slice_in_dim(x, start, size)
        y = matmul(rows, w.mT if transposed else w, precision=precision)
        return jnp.where(mine[:, None], y, jnp.zeros_like(y)), start

    def add(y, i):
        new, start = part(i, x, q)
        new = new + lax.dynamic_slice_in_dim(y, start, size)
        return lax.dynamic_update_slice_in_dim(y, new, start, axis=0), None

    steps = jnp.arange(min(m, tiles + number - 1), dtype=upto.dtype)
    new, start = part(steps[0], x, q)
    y = lax.full_like(new, 0, shape=(tiles * size, new.shape[1]))
    y = lax.dynamic_update_slice_in_dim(y, new, start, axis=0)
    y, _ = lax.scan(add, y, steps[1:])
    return y[:m]


def _tile(m, number):
    # Large enough that few weights are read twice, small enough that few rows of a tile
    # are computed in vain.
    mean = max(1, m // number)
    return min(256, max(8, 2 ** math.ceil(math.log2(mean))))
