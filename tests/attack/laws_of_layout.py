"""How the codes lie: nothing that only moves them changes what they stand for."""

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

import eqquant as eqq

from ..panels import in_panels, misread
from .same import equal, refuses, same


def layout(case, q, d, w):
    if isinstance(q.axis, int) and q.axis >= -2 and q.ndim > 1:
        yield "mT twice", same(q.mT.mT, q)
        yield "mT", equal(q.mT, d.mT)
    leaves, tree = jtu.tree_flatten(q)
    yield "flattened", same(tree.unflatten(leaves), q)
    yield "integers", all(jnp.issubdtype(a.dtype, jnp.integer) for a in leaves)
    yield "device_put", same(jax.device_put(q, jax.devices()[-1]), q)
    yield "jit", same(jax.jit(lambda q: q)(q), q)
    order = tuple(int(i) for i in case.rng.permutation(q.ndim))
    yield f"transpose{order}", equal(q.transpose(*order), d.transpose(*order))
    i, j = case.integer(-q.ndim, q.ndim - 1), case.integer(-q.ndim, q.ndim - 1)
    yield f"swapaxes({i}, {j})", equal(q.swapaxes(i, j), d.swapaxes(i, j))


def prepacked(case, q, d, w):
    for platform in ("gpu", "tpu", "cpu", None):
        packed = eqq.tree_prepack(q, platform)
        yield platform, equal(packed, d)
        yield (
            f"{platform} and back",
            same(eqq.tree_prepack(packed, "cpu"), eqq.tree_prepack(q, "cpu")),
        )


def panels(case, q, d, w):
    if q.layout.row_axis != -1 or q.ndim < 2 or q.size == 0:
        return
    rows = q.layout.shape(q.stored)[-2]
    if rows == 1:
        return
    # (As many rows as fill panels.)
    many = jtu.tree_map(
        lambda a: a if a.shape[-1] == 1 else jnp.concatenate([a] * 64, -1), q
    )
    p = in_panels(many)
    yield f"panels of {rows} x 64 rows", equal(p, many.dequantize())
    wrong = [*misread(many, p, sharded=jax.device_count() > 1)]
    yield f"panels: {wrong}", wrong == []


def numpy_leaves(case, q, d, w):
    on_host = jax.device_get(q)
    yield "dequantize", equal(on_host, d)
    yield "placement", on_host.placement is None and not on_host.is_sharded
    if q.size > 0:
        x = jnp.ones((2, q.shape[0] if q.ndim == 1 else q.shape[-2]))
        yield "product", equal(x @ on_host, x @ q)
        yield "row", equal(on_host[0], d[0])
    yield "repr", repr(on_host) == repr(q)
    yield "prepacked", equal(eqq.tree_prepack(on_host), d)


def stacked(case, q, d, w):
    many = jtu.tree_map(lambda a: jnp.stack([a, a, a]), q)
    yield "stack", equal(many, jnp.stack([d, d, d]))
    for i in (0, 2, -1):
        yield f"unstack {i}", same(jtu.tree_map(lambda a: a[i], many), q)
        if q.ndim > 1:
            yield f"index {i}", equal(many[i], d)
    yield "vmap", equal(jax.vmap(lambda q: q.dequantize())(many), jnp.stack([d] * 3))


def indexed(case, q, d, w):
    if q.size == 0:
        return
    size = q.shape[0]
    found = {
        "integer": case.integer(-size, size - 1),
        "slice": slice(case.integer(0, size), None, case.pick((None, 2, -1))),
        "array": case.rng.integers(-size, size, 3),
        "ellipsis": (..., case.integer(0, q.shape[-1] - 1)),
        "column": (slice(None), 0) if q.ndim > 1 else (slice(1, None),),
        "new axis": (None, 0),
        "mask": case.rng.random(size) < 0.5,
        "two": (0, slice(None, None, 2)) if q.ndim > 1 else (0,),
        "beyond": jnp.asarray([size + 3, -size - 2]),
    }
    for name, index in found.items():
        yield f"{name} {index}", equal(q[index], d[index])
    traced = jnp.asarray(case.integer(-2 * size, 2 * size))
    yield f"traced {traced}", equal(jax.jit(lambda q, i: q[i])(q, traced), d[traced])
    yield "len", len(q) == len(d)
    yield "iter", all(map(equal, q, d))


def mapped_axes(case, q, d, w):
    # Over any axis: mapped rightly, or refused. Never otherwise.
    if q.ndim < 2 or 0 in q.shape:
        return
    for axis in range(-q.ndim, q.ndim):
        expected = jax.vmap(lambda a: 1.0 * a, axis)(d)
        fn = lambda: jax.vmap(lambda q: q.dequantize(), axis)(q)
        if not refuses(fn):
            yield f"vmap over axis {axis}", equal(fn(), expected)


laws = (layout, prepacked, panels, numpy_leaves, stacked, indexed, mapped_axes)
