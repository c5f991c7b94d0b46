import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import eqquant as eqq
from eqquant import implicit

from ..helpers import formats, normal
from .same import assert_close


# Every way of indexing is that of JAX, for every index: negative ones, and those out of
# range, of every integer dtype.

shape = (4, 6, 16)


ways = {
    "layer": lambda w, i: w[i],
    "row": lambda w, i: w[:, i],
    "both": lambda w, i: w[i, i],
    "several": lambda w, i: w[jnp.stack([i, i])],
    "rows": lambda w, i: w[:, jnp.stack([i, i])],
    "slice": lambda w, i: lax.dynamic_slice_in_dim(w, i, 2, 0),
    "blocks": lambda w, i: lax.dynamic_slice(w, (i, i, i), (2, 3, 16)),
    "inside-blocks": lambda w, i: lax.dynamic_slice(w, (i, i, i), (2, 3, 5)),
    "as-it-is": lambda w, i: lax.dynamic_slice(
        w, (i, i, i), (1, 6, 16), allow_negative_indices=False
    ),
    "part-of-rows": lambda w, i: lax.dynamic_slice(
        w, (i, i, i), (4, 2, 16), allow_negative_indices=(True, False, True)
    ),
    "index": lambda w, i: lax.dynamic_index_in_dim(w, i, 1, keepdims=False),
    "update": lambda w, i: lax.dynamic_update_slice(w, w[:2, :3], (i, i, i)),
    "update-as-it-is": lambda w, i: lax.dynamic_update_slice(
        w, w[:2, :3], (i, i, i), allow_negative_indices=False
    ),
    "clip": lambda w, i: jnp.take(w, i, axis=0, mode="clip"),
    "wrap": lambda w, i: jnp.take(w, i, axis=1, mode="wrap"),
    "fill": lambda w, i: jnp.take(w, i, axis=0, mode="fill"),
    "fill-value": lambda w, i: jnp.take(w, i, axis=1, mode="fill", fill_value=3.0),
    "get": lambda w, i: w.at[i].get(mode="fill", fill_value=7.0),
    "get-clipped": lambda w, i: w.at[:, jnp.stack([i, i])].get(mode="clip"),
    "get-as-it-is": lambda w, i: w.at[i].get(wrap_negative_indices=False, mode="clip"),
    "set": lambda w, i: w.at[i].set(1.0),
    "add": lambda w, i: w.at[:, i].add(w[0, 0]),
    "dropped": lambda w, i: w.at[i].set(1.0, mode="drop"),
    "along": lambda w, i: jnp.take_along_axis(w, jnp.full((1, 1, 1), i), axis=0),
    "mapped": lambda w, i: jax.vmap(lambda i: w[i])(jnp.stack([i, i])),
    "mapped-slices": lambda w, i: jax.vmap(
        lambda i: lax.dynamic_slice_in_dim(w, i, 2, 0, allow_negative_indices=False)
    )(jnp.stack([i, i])),
    "slices-of-mapped": lambda w, i: jax.vmap(
        lambda w: lax.dynamic_slice_in_dim(w, i, 2, allow_negative_indices=False)
    )(w),
    "compiled": lambda w, i: jax.jit(lambda w, i: w[i].T)(w, i),
    "branch": lambda w, i: lax.cond(i > 0, lambda: w[i], lambda: w[-1]),
}


def check(fn, q, ids):
    # One program for all indices.
    def every(fn):
        return jax.jit(lambda w: lax.map(lambda i: eqq.tree_dequantize(fn(w, i)), ids))

    assert_close(every(implicit(fn))(q), every(fn)(q.dequantize()), 1e-6)


@pytest.mark.examples(1)
@pytest.mark.parametrize(
    "axis, dtype",
    [
        (-1, jnp.int32),
        (-2, jnp.int32),
        (-3, jnp.int32),
        (-1, jnp.uint8),
        (-1, jnp.int8),
        (-2, jnp.uint32),
    ],
)
def test_ways_of_indexing(axis, dtype):
    limits = jnp.iinfo(dtype)
    near = [-200, -9, -7, -6, -5, -4, -1, 0, 1, 3, 4, 5, 6, 9, 200]
    numbers = [limits.min, limits.max, *near]
    ids = [i for i in numbers if limits.min <= i <= limits.max]
    q = eqq.quantize(normal(*shape), "int8", axis=axis)
    check(
        lambda w, i: {name: fn(w, i) for name, fn in ways.items()},
        q,
        jnp.asarray(ids, dtype),
    )


class Program:
    """Some indices one after another, drawn at random."""

    def __init__(self, seed):
        self.seed = seed

    def __call__(self, w, i):
        rng = np.random.default_rng(self.seed)
        for _ in range(3):
            w = _step(rng, w, i)
        return w


def _step(rng, w, i):
    if w.ndim < 2:
        return w
    axis = int(rng.integers(w.ndim))
    size = w.shape[axis]
    signed = bool(rng.integers(2))
    start = i * int(rng.integers(1, 3)) + int(rng.integers(-2, 3))
    match rng.integers(7):
        case 0:
            cut = slice(
                int(rng.integers(-size - 2, size)), None, int(rng.integers(1, 3))
            )
            return w[(slice(None),) * axis + (cut,)]
        case 1:
            return jnp.take(w, start, axis=axis)
        case 2:
            mode = ["clip", "wrap", "fill"][rng.integers(3)]
            ids = start + jnp.arange(int(rng.integers(1, 4)))
            return jnp.take(w, ids, axis=axis, mode=mode)
        case 3:
            length = int(rng.integers(0, size + 1))
            return lax.dynamic_slice_in_dim(
                w, start, length, axis, allow_negative_indices=signed
            )
        case 4:
            lengths = [int(rng.integers(0, n + 1)) for n in w.shape]
            lengths = [n if rng.integers(3) else m for n, m in zip(w.shape, lengths)]
            return lax.dynamic_slice(
                w, [start] * w.ndim, lengths, allow_negative_indices=signed
            )
        case 5:
            return jax.vmap(lambda i: w[i])(start + jnp.arange(2))
        case _:
            return jnp.moveaxis(w, axis, 0)[:: -1 if signed else 1, None]


@pytest.mark.examples(4)
@pytest.mark.parametrize("seed", range(24))
def test_random_programs(seed):
    rng = np.random.default_rng(seed)
    axis = int(rng.integers(-3, 0))
    name = ["int8", "nested", "int4-affine"][rng.integers(3)]
    q = eqq.quantize(normal(*shape), formats[name], axis=axis)
    check(Program(seed), q, jnp.asarray([-7, -5, -3, -1, 0, 1, 2, 3, 5, 40]))
