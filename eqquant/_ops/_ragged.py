import dataclasses
import functools as ft
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Inexact, Integer, Shaped

from .._array import as_mapped, leading_axes, matmul, QuantizedArray
from .._product import (
    declared_by_row,
    number_of_shards,
    spec_of,
    vary_together,
)


def ragged_dot(
    x: Shaped[Array, "m k"],
    q: QuantizedArray,
    group_sizes: Integer[Array, " g"],
    *,
    transposed: bool,
    dtype: Any,
    precision: str | None,
) -> Inexact[Array, "m n"] | None:
    """Computes `lax.ragged_dot`: multiplies the first `group_sizes[0]` rows of `x` by
    the first weight of `q[g, k, n]` (of `q[g, n, k]` if `transposed`), the next rows by
    the second, and so on. Rows beyond the sum of the sizes give zeros; sizes beyond the
    number of rows are ignored. Returns `None` if blocks lie along the axis `g`.

    This scans over pairs of a tile of rows and a weight that some of its rows need. So
    one weight is read at a time, and unneeded weights are not read at all. If weights
    are split over devices, each device scans its own weights, and the results are
    added.
    """
    q = as_mapped(q)
    number = q.shape[0]
    if 0 not in leading_axes(q) or q.ndim != 3 or number == 0 or x.shape[0] == 0:
        return None
    return _scanned(x, q, group_sizes, transposed, dtype, precision)


def _shards(q: QuantizedArray) -> tuple[int, NamedSharding | None]:
    # Returns into how many parts the axis `g` is split, by the declared sharding, and
    # the sharding of a stack of one weight from each part. (With a single part, the
    # sharding of one weight.)
    declared = declared_by_row(q.sharding, q.axis, q.ndim)
    manual = jax.sharding.get_abstract_mesh().manual_axes
    if q.sharding is None or declared is None or manual:
        return 1, None
    # The spec describes the last axes: fill it up on the left.
    entry, *others = (*[None] * q.ndim, *spec_of(q.sharding))[-q.ndim :]
    number = number_of_shards(declared.mesh, entry)
    leaves = jtu.tree_leaves(q.stored)
    if number == 1 or any(a.shape[0] % number != 0 for a in leaves):
        return 1, NamedSharding(declared.mesh, PartitionSpec(*others))
    return number, NamedSharding(declared.mesh, PartitionSpec(entry, *others))


# Jitted so that eager calls compile once for each shape.
@ft.partial(jax.jit, static_argnums=(3, 4, 5), inline=True)
def _scanned(x, q, group_sizes, transposed, dtype, precision):
    shards, sharding = _shards(q)
    m, number = x.shape[0], q.shape[0] // shards
    size = min(m, _tile(m, q.shape[0]))
    tiles = -(-m // size)
    x = jnp.pad(x.astype(dtype), ((0, tiles * size - m), (0, 0)))

    # Narrow integers could overflow before `m`.
    if group_sizes.dtype.itemsize < 4:
        group_sizes = group_sizes.astype(jnp.int32)
    # Rows beyond the last one do not exist.
    ends = jnp.cumsum(group_sizes)
    starts, ends = jnp.minimum(ends - group_sizes, m), jnp.minimum(ends, m)
    first = starts // size
    # The number of tiles that need each weight.
    tiles_of = jnp.where(ends > starts, (ends - 1) // size - first + 1, 0)

    # Each shard scans its own weights, in parallel with the others.
    split = lambda a: a.reshape(shards, number, *a.shape[1:])
    starts, ends, first, tiles_of = map(split, (starts, ends, first, tiles_of))
    upto = jnp.cumsum(tiles_of, axis=1)
    stored = jtu.tree_map(split, q.stored)

    def place(i, starts, ends, first, tiles_of, upto):
        # Returns the weight of step `i`, the first row of its tile, and which rows of
        # the tile belong to the weight. (Steps from `upto[-1]` on have none.)
        which = jnp.minimum(jnp.sum(upto <= i), number - 1)
        start = (first[which] + i - (upto[which] - tiles_of[which])) * size
        row = start + jnp.arange(size, dtype=start.dtype)
        mine = (row >= starts[which]) & (row < ends[which])
        return which, start, mine

    places = jax.vmap(place, (None, 0, 0, 0, 0, 0))
    index = jax.vmap(ft.partial(lax.dynamic_index_in_dim, keepdims=False))
    rows_of = lambda x, start: lax.dynamic_slice_in_dim(x, start, size)

    @jax.checkpoint
    def part(i, x, stored):
        which, start, mine = places(i, starts, ends, first, tiles_of, upto)
        w = jtu.tree_map(lambda a: index(a, which), stored)
        rows = jax.vmap(rows_of, (None, 0))(x, start)
        if shards == 1:
            rows, w = jtu.tree_map(lambda a: a[0], (rows, w))
        w = dataclasses.replace(q, stored=w, sharding=sharding)
        y = matmul(rows, w.mT if transposed else w, precision=precision)
        y = y.reshape(shards, *y.shape[-2:])
        return jnp.where(mine[..., None], y, jnp.zeros_like(y)), start

    def add(y, i):
        new, start = part(i, x, stored)
        new = new + jax.vmap(rows_of)(y, start)
        update = ft.partial(lax.dynamic_update_slice_in_dim, axis=0)
        return jax.vmap(update)(y, new, start), None

    steps = jnp.arange(min(m, tiles + number - 1), dtype=upto.dtype)
    new = jax.eval_shape(part, steps[0], x, stored)[0]
    y = jnp.zeros((shards, tiles * size, new.shape[-1]), new.dtype)
    y, *_ = vary_together(y, x, group_sizes, *jtu.tree_leaves(stored))
    y, _ = lax.scan(add, y, steps)
    return jnp.sum(y, axis=0)[:m] if shards > 1 else y[0, :m]


def _tile(m, number):
    # Large enough that few weights are read twice, small enough that little work is
    # wasted on rows of a tile that belong to other weights.
    mean = max(1, m // number)
    return min(256, max(8, 2 ** math.ceil(math.log2(mean))))
