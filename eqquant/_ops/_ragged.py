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
    """`lax.ragged_dot`: the first `group_sizes[0]` rows of `x` with the first weight of
    `q[g, k, n]` (of `q[g, n, k]` if `transposed`), the next with the second, and so on.
    `None` if blocks lie along the axis of the weights.

    A scan over tiles of rows, and over the weights that each of them meets. Those that
    none meets are not read, and no more than one is at a time.
    """
    q = as_mapped(q)
    number = q.shape[0]
    if 0 not in leading_axes(q) or q.ndim != 3 or number == 0 or x.shape[0] == 0:
        return None
    return _scanned(x, q, group_sizes, transposed, dtype, precision)


# An eager call compiles once for each shape.
@ft.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _scanned(x, q, group_sizes, transposed, dtype, precision):
    m, number = x.shape[0], q.shape[0]
    size = min(m, _tile(m, number))
    tiles = -(-m // size)
    x = jnp.pad(x.astype(dtype), ((0, tiles * size - m), (0, 0)))

    # (Small integers could not count as far as `m`.)
    if group_sizes.dtype.itemsize < 4:
        group_sizes = group_sizes.astype(jnp.int32)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    first = starts // size
    met = jnp.where(group_sizes > 0, (ends - 1) // size - first + 1, 0)
    upto = jnp.cumsum(met)

    @jax.checkpoint
    def part(i, x, q):
        # The tile and the weight of step `i`. There may be fewer steps than that.
        which = jnp.minimum(jnp.sum(upto <= i), number - 1)
        start = (first[which] + i - (upto[which] - met[which])) * size
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
    # So many rows that few weights are met twice, and few rows are for nothing.
    mean = max(1, m // number)
    return min(256, max(8, 2 ** math.ceil(math.log2(mean))))
