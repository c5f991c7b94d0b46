"""Weights whose rows lie in panels, and all ways to take parts of stored arrays."""

import io
import itertools as it
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import eqquant as eqq
from eqquant._array import relaid


def in_panels(q: eqq.QuantizedArray) -> eqq.QuantizedArray:
    """The same array with its rows in panels, on machines that do not gain by it,
    too."""
    p = relaid(q, q.layout.in_panels(*q.layout.shape(q.stored)[-2:]))
    assert p.layout.panels is not None
    return p


def parts(q: eqq.QuantizedArray) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """Functions of an array that split, join, place or write its stored arrays as they
    are. Of arrays in panels, each should give what it gives of rows side by side, or
    raise an error."""
    *lead, n, k = q.layout.shape(q.stored)
    axes = (len(lead), len(lead) + 1, -1)
    each = lambda fn: lambda *q: jtu.tree_map(fn, *q)
    for size, axis in it.product({1, 64, 100, n // 2, k // 2}, axes):
        to, on = [(*[slice(None)] * axis, i) for i in (slice(size), slice(size, None))]
        if axis == -1:
            to, on = (..., slice(size)), (..., slice(size, None))
        yield f"[:{size}] of {axis}", each(lambda a, to=to: a[to])
        yield f"[{size}:] of {axis}", each(lambda a, on=on: a[on])
    for axis in (0, *axes):
        join = each(lambda *a, axis=axis: jnp.concatenate(a, axis))
        yield f"joined along {axis}", lambda q, join=join: join(q, q)
        yield f"half of {axis}", each(lambda a, i=axis: jnp.split(a, 2, i)[0])
        some = lambda a, i=axis: jnp.take(a, jnp.array([0, 3, 1]), i, mode="clip")
        yield f"some of {axis}", each(some)
        decode = lambda q: q.dequantize()
        yield f"mapped along {axis}", lambda q, i=axis: jax.vmap(decode, i)(q)
    stack = each(lambda a: jnp.stack([a, a]))
    yield "stacked", stack
    yield "one of a stack", lambda q: jtu.tree_map(lambda a: a[1], stack(q))


def shards(q: eqq.QuantizedArray) -> Iterator[tuple[str, Callable[[Any], Any]]]:
    """The same, of functions that split stored arrays over two devices."""
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    for entries in ((), ("a",), (None, "a"), (None, None, "a"), ("a", None)):
        spec = P(*entries)
        place = lambda q, spec=spec: jax.device_put(q, NamedSharding(mesh, spec))
        yield f"placed as {spec}", place
        for axis in range(q.ndim):
            out = P(*[None] * axis, "a")
            decode = jax.shard_map(
                lambda q: q.dequantize(), mesh=mesh, in_specs=spec, out_specs=out
            )
            yield f"shard_map, {spec} to {out}", jax.jit(decode)
        if q.axis == -2:
            columns = jax.shard_map(
                lambda x, q: x @ q, mesh=mesh, in_specs=(P(), spec), out_specs=spec
            )
            x = jnp.ones((*q.shape[:-2], 1, q.shape[-2]))
            yield (
                f"product in shard_map, {spec}",
                lambda q, x=x, columns=columns: jax.jit(columns)(x, q),
            )


def misread(
    q: eqq.QuantizedArray, p: eqq.QuantizedArray, sharded: bool = False
) -> Iterator[str]:
    """The `parts` and `shards` of an array in panels, `p`, that are neither refused nor
    those of `q`, and not the whole array either."""
    every = [*parts(q), *(shards(q) if sharded else ())]
    found = [(name, _tried(fn, p), fn) for name, fn in every]
    yield from (
        name
        for name, a, fn in found
        if a is not None and not _same(a, _tried(fn, q)) and not _same(a, _dense(q))
    )
    # As leaves of a file.
    for name, a, b in (("panels as rows", p, q), ("rows as panels", q, p)):
        file = io.BytesIO()
        eqx.tree_serialise_leaves(file, a)
        file.seek(0)
        read = _tried(lambda b, file=file: eqx.tree_deserialise_leaves(file, b), b)
        if read is not None and not _same(read, _dense(q)):
            yield name


def _tried(fn, q):
    try:
        return _dense(fn(q))
    except (ValueError, TypeError, IndexError, RuntimeError):
        return None


def _dense(x):
    return np.asarray(x.dequantize() if eqq.is_quantized(x) else x, np.float64)


def _same(a, b):
    if b is None or a.shape != b.shape:
        return False
    return np.allclose(a, b, 1e-4, 1e-4 * np.max(np.abs(b), initial=0), equal_nan=True)
