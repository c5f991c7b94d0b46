import dataclasses
import functools as ft
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, PyTree

from .._array import as_dense, QuantizedArray
from .._quantize import quantize
from ..formats import Dynamic8


# A running mean of gradients, or of their squares: flattened and quantized, or in
# float32 and of the shape of the parameter.
Moment: TypeAlias = QuantizedArray | Array

# A hyperparameter. (An array, if `optax.inject_hyperparams` gives it.)
Scalar: TypeAlias = float | int | Array


def optax_library() -> Any:
    """The library, which only those need who use this."""
    if importlib.util.find_spec("optax") is None:
        raise ModuleNotFoundError(
            "8-bit optimizers are gradient transformations of optax, which is not "
            "installed. Install it by `pip install eqquant[train]`."
        )
    return importlib.import_module("optax")


def zeros(
    params: PyTree,
    format: Dynamic8,
    filter_spec: PyTree,
    min_size: int,
    embeddings: bool,
) -> PyTree[Moment]:
    """The moments to begin with: in `format` those of parameters that are large, and
    of no embedding, and that `filter_spec` does not leave out."""

    def zero(x, wish, embedding):
        is_8bit = wish and x.size >= min_size and (embeddings or not embedding)
        return _zeros(x.shape, format if is_8bit else None)

    wishes = _extended(filter_spec, params)
    return jtu.tree_map(zero, params, wishes, _embeddings(params))


def advance(
    fn: Callable[..., tuple[Array, ...]], g: Array, *moments: Any
) -> tuple[Any, ...]:
    """One step for one parameter.

    **Arguments:**

    - `fn`: from a gradient and its moments to the update and the new moments, number by
        number and in float32.
    - `g`: the gradient.
    - `moments`: as they are stored.

    **Returns:**

    The update, in the dtype of `g`, and the new moments, stored alike.
    """
    first = moments[0]
    if not isinstance(first, QuantizedArray):
        update, *new = fn(g.astype(jnp.float32), *moments)
        return update.astype(g.dtype), *new
    block = first.format.block_size or g.size
    size = max(1, _part // block) * block

    # Some numbers at a time, or else all would be there in float32 after all. The
    # update takes the place of the gradient.
    def step(start, size, found):
        g, *old = (_cut(x, start, size) for x in found)
        update, *new = fn(g.astype(jnp.float32), *map(as_dense, old))
        new = [quantize(x, q.format) for x, q in zip(new, moments, strict=True)]
        parts = (update.astype(g.dtype), *new)
        return tuple(_paste(x, y, start) for x, y in zip(found, parts, strict=True))

    found: tuple[Any, ...] = (g.reshape(-1), *moments)
    whole = g.size // size
    if whole > 0:
        found = lax.fori_loop(0, whole, lambda i, x: step(i * size, size, x), found)
    if g.size % size > 0:
        found = step(whole * size, g.size % size, found)
    return found[0].reshape(g.shape), *found[1:]


# How many numbers at a time.
_part = 2**17


def _cut(x, start, size):
    def cut(a, per):
        return lax.dynamic_slice_in_dim(a, start // per, -(-size // per))

    return _by_block(cut, x)


def _paste(x, part, start):
    parts = iter(jtu.tree_leaves(part))

    def paste(a, per):
        return lax.dynamic_update_slice_in_dim(a, next(parts), start // per, 0)

    return _by_block(paste, x)


def _by_block(fn, x):
    # Of a moment, there is a scale for each block.
    if not isinstance(x, QuantizedArray):
        return fn(x, 1)
    per = {"codes": 1, "scale": x.format.block_size or x.size}
    stored = {name: fn(x.stored[name], per[name]) for name in sorted(x.stored)}
    return dataclasses.replace(x, stored=stored)


@ft.partial(jax.jit, static_argnums=(0, 1))
def _zeros(shape, format):
    x = jnp.zeros(shape, jnp.float32)
    if format is None:
        return x
    # Or else XLA would quantize it while it compiles, and slowly.
    return quantize(lax.optimization_barrier(x.reshape(-1)), format)


def _extended(filter_spec, params):
    def extend(spec, subtree):
        wish = spec if callable(spec) else lambda _: spec
        return jtu.tree_map(lambda x: bool(wish(x)), subtree)

    return jtu.tree_map(extend, filter_spec, params)


def _embeddings(params):
    is_embedding = lambda x: isinstance(x, eqx.nn.Embedding)

    def flags(node):
        return jtu.tree_map(lambda _: is_embedding(node), node)

    return jtu.tree_map(flags, params, is_leaf=is_embedding)
