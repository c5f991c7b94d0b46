import dataclasses
import functools as ft
import itertools as it
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jaxtyping import Array, Int, PyTree

from ..._array import QuantizedArray
from ..._product import by_types, number_of_shards, stay, typed_sharding, vary_together
from ...formats import AbstractDithered


def advance(
    fn: Callable[..., tuple[Array, ...]],
    options: tuple[Any, ...],
    count: Int[Array, ""],
    updates: PyTree[Array],
    *moments: PyTree,
) -> tuple[PyTree, ...]:
    """One optimizer step for all parameters, from their gradients and the stored
    moments, each a PyTree of the structure of `updates`. Returns the updates, in the
    dtypes of the gradients, and the new moments, stored like the old ones.

    - `fn`: `(options, gradient, *moments) -> (update, *moments)`, elementwise, in
        float32.
    - `options`: hyperparameters: numbers and scalar arrays.
    - `count`: the number of the step, which seeds the rounding of moments.
    """
    leaves, treedef = jtu.tree_flatten(updates)
    each = zip(leaves, *map(treedef.flatten_up_to, moments))
    results = [_advance(fn, options, count, g, *old) for g, *old in each]
    number = 1 + len(moments)
    return tuple(treedef.unflatten([new[i] for new in results]) for i in range(number))


def _advance(fn, options, count, g, *moments):
    first = moments[0]
    if not isinstance(first, QuantizedArray):
        update, *new = fn(options, g.astype(jnp.float32), *moments)
        return update.astype(g.dtype), *new
    formats = [q.format for q in moments]
    types = [jax.typeof(a).sharding for a in jtu.tree_leaves((g, moments))]
    typed = typed_sharding(first.stored, first.layout, first.axis)
    # The declared sharding is only a hint: if the arrays are placed otherwise, the
    # result is the same, but slower.
    known = typed or first.sharding
    shards = 1
    if isinstance(known, NamedSharding):
        shards = number_of_shards(known.mesh, known.spec[0])

    def run(options, count, g, moments):
        one = ft.partial(fn, options)
        leaves, treedef = jtu.tree_flatten((g, [q.stored for q in moments]))
        g, stored = treedef.unflatten(vary_together(*leaves))
        update, *stored = _by_parts(one, formats, shards, count, g, stored)
        treedef = jtu.tree_structure(moments)
        new = treedef.unflatten(jtu.tree_leaves(stored))
        return update, *map(_stay, new)

    if typed is not None:
        treedef = jtu.tree_structure((g, *moments))
        run = by_types(run, treedef.unflatten(types))
    return run(options, count, g, moments)


def _stay(q):
    if not isinstance(q.sharding, NamedSharding) or q.sharding.mesh.explicit_axes:
        return q
    stored = jtu.tree_map(lambda a: stay(a, q.sharding), q.stored)
    return dataclasses.replace(q, stored=stored)


# The number of elements that are decoded at a time.
_part = 2**17


def _by_parts(fn, formats, shards, count, g, stored):
    """Applies `fn` to a gradient and its flat moments, `_part` elements at a time, so
    that the moments never exist in float32 as a whole. The update overwrites the
    gradient. All shards advance together, so that each device reads and writes only its
    own part."""
    # The number of elements per entry of codes, and of scales.
    per = [(int(8 // f.bits), f.block_size or g.size) for f in formats]
    block = math.lcm(*it.chain(*per))
    if g.size % (shards * block) != 0:
        shards = 1
    length = g.size // shards
    size = max(1, _part // block) * block

    def step(start, size, state):
        cut = lambda a, per: lax.dynamic_slice_in_dim(
            a, start // per, -(-size // per), 1
        )
        g, *old = _by_entry(cut, per, state)
        tails = [-size % codes for codes, _ in per]
        old = [f.decode(*args) for f, *args in zip(formats, old, tails)]
        old = [m.astype(jnp.float32) for m in old]
        update, *new = fn(g.astype(jnp.float32), *old)
        new = [_encode(f, w, count) for f, w in zip(formats, new)]
        parts = iter(jtu.tree_leaves((update.astype(g.dtype), *new)))

        def paste(a, per):
            return lax.dynamic_update_slice_in_dim(a, next(parts), start // per, 1)

        return _by_entry(paste, per, state)

    state = jtu.tree_map(lambda a: a.reshape(shards, -1), (g, *stored))
    whole = length // size
    if whole > 0:
        state = lax.fori_loop(0, whole, lambda i, x: step(i * size, size, x), state)
    if length % size > 0:
        state = step(whole * size, length % size, state)
    update, *stored = state
    flat = jtu.tree_map(lambda a: a.reshape(-1), stored)
    return update.reshape(g.shape), *flat


# Close to the largest float32: larger moments saturate, so that their block is not NaN.
_most = np.float32(3e38)


def _encode(format, moment, count):
    within = jnp.clip(moment, -_most, _most)
    moment = jnp.where(jnp.isinf(moment), moment, within)
    if isinstance(format, AbstractDithered) and format.dithered:
        return format.encode_dithered(moment, count)
    return format.encode(moment)


def _by_entry(fn, per, state):
    # Returns `fn(array, elements per entry)` for the gradient, the codes and the
    # scales.
    g, *stored = state

    def one(stored, codes, scale):
        return {
            "codes": fn(stored["codes"], codes),
            "scale": fn(stored["scale"], scale),
        }

    return fn(g, 1), *[one(s, *each) for s, each in zip(stored, per)]
