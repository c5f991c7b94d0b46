import dataclasses
import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, PyTree

from .._array import QuantizedArray
from .._product import by_types, number_of_shards, stay, typed_sharding, vary_together


def advance(
    fn: Callable[..., tuple[Array, ...]],
    options: tuple[Any, ...],
    updates: PyTree[Array],
    *moments: PyTree,
) -> tuple[PyTree, ...]:
    """One step for all parameters.

    **Arguments:**

    - `fn`: from `options`, a gradient and its moments to the update and the new
        moments, number by number and in float32.
    - `options`: numbers, and arrays of one number.
    - `updates`: the gradients.
    - `moments`: as they are stored, each a PyTree like `updates`.

    **Returns:**

    The updates, in the dtypes of the gradients, and the new moments, stored alike.
    """
    leaves, treedef = jtu.tree_flatten(updates)
    each = zip(leaves, *map(treedef.flatten_up_to, moments))
    found = [_advance(fn, options, g, *old) for g, *old in each]
    number = 1 + len(moments)
    return tuple(treedef.unflatten([new[i] for new in found]) for i in range(number))


def _advance(fn, options, g, *moments):
    first = moments[0]
    if not isinstance(first, QuantizedArray):
        update, *new = fn(options, g.astype(jnp.float32), *moments)
        return update.astype(g.dtype), *new
    formats = [q.format for q in moments]
    types = [jax.typeof(a).sharding for a in jtu.tree_leaves((g, moments))]
    typed = typed_sharding(first.stored, first.layout, first.axis)
    # What was declared is a hint: parts that are not those of the devices are slower,
    # and give the same.
    known = typed or first.sharding
    shards = 1
    if isinstance(known, NamedSharding):
        shards = number_of_shards(known.mesh, known.spec[0])

    def run(options, g, moments):
        one = ft.partial(fn, options)
        leaves, treedef = jtu.tree_flatten((g, [q.stored for q in moments]))
        g, stored = treedef.unflatten(vary_together(*leaves))
        update, *stored = _by_parts(one, formats, shards, g, stored)
        treedef = jtu.tree_structure(moments)
        new = treedef.unflatten(jtu.tree_leaves(stored))
        return update, *map(_stay, new)

    if typed is not None:
        treedef = jtu.tree_structure((g, *moments))
        run = by_types(run, treedef.unflatten(types))
    return run(options, g, moments)


def _stay(q):
    if not isinstance(q.sharding, NamedSharding) or q.sharding.mesh.explicit_axes:
        return q
    stored = jtu.tree_map(lambda a: stay(a, q.sharding), q.stored)
    return dataclasses.replace(q, stored=stored)


# How many numbers at a time.
_part = 2**17


def _by_parts(fn, formats, shards, g, stored):
    """Of a gradient and of moments that are stored flat, some numbers at a time, or
    else all would be there in float32 after all. The update takes the place of the
    gradient. Each of so many shards goes along at the same time, so that none of it
    is sent where these are on devices of their own."""
    blocks = [format.block_size or g.size for format in formats]
    block = math.lcm(*blocks)
    if g.size % (shards * block) != 0:
        shards = 1
    length = g.size // shards
    size = max(1, _part // block) * block

    def step(start, size, found):
        cut = lambda a, per: lax.dynamic_slice_in_dim(
            a, start // per, -(-size // per), 1
        )
        g, *old = _by_block(cut, blocks, found)
        old = [f.decode(s, 0).astype(jnp.float32) for f, s in zip(formats, old)]
        update, *new = fn(g.astype(jnp.float32), *old)
        new = [f.encode(w) for f, w in zip(formats, new)]
        parts = iter(jtu.tree_leaves((update.astype(g.dtype), *new)))

        def paste(a, per):
            return lax.dynamic_update_slice_in_dim(a, next(parts), start // per, 1)

        return _by_block(paste, blocks, found)

    found = jtu.tree_map(lambda a: a.reshape(shards, -1), (g, *stored))
    whole = length // size
    if whole > 0:
        found = lax.fori_loop(0, whole, lambda i, x: step(i * size, size, x), found)
    if length % size > 0:
        found = step(whole * size, length % size, found)
    update, *stored = found
    flat = jtu.tree_map(lambda a: a.reshape(-1), stored)
    return update.reshape(g.shape), *flat


def _by_block(fn, blocks, found):
    # Of a moment, there is a scale for each block.
    g, *stored = found
    one = lambda s, block: {"codes": fn(s["codes"], 1), "scale": fn(s["scale"], block)}
    return fn(g, 1), *[one(s, block) for s, block in zip(stored, blocks)]
