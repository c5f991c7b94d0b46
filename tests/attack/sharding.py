from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

from . import inputs, weights
from .case import Case
from .formats import draw_activation, draw_multiplied, name_of
from .oracle import product, wrong
from .problems import largest_error, problem_of
from .products import rounded
from .same import equal


_sizes = ((512, 64), (256, 128), (768, 32), (512, 640), (1280, 32), (320, 48))
_entries = (None, None, "a", "b", ("a", "b"))


def sharding(case: Case) -> None:
    """Products of arrays over eight devices, split as was drawn."""
    on = _mesh(case)
    format, kind = draw_multiplied(case), case.pick(weights.kinds)
    stack = case.pick(((), (), (), (8,), (2, 4)))
    shape = (*stack, *case.pick(_sizes))
    axis = case.pick((-2, -1))
    q = weights.draw_quantized(
        case,
        format,
        shape,
        kind,
        case.pick((jnp.float32, jnp.bfloat16)),
        axis=axis,
        activation=draw_activation(case),
    )
    q = q.mT if case.chance(0.3) else q
    x_kind = case.pick(inputs.kinds)
    rows = case.pick((8, 16, 40))
    x_shape, v_shape = (*stack, rows, q.shape[-2]), (*stack, rows, q.shape[-1])
    dtype = case.pick((jnp.float32, jnp.bfloat16))
    x = inputs.draw_inputs(case, x_shape, x_kind, dtype)
    v = inputs.draw_inputs(case, v_shape, x_kind, dtype)
    w = weights.dense(q)
    names = dict(kind="sharding", format=name_of(format), inputs=x_kind, weights=kind)
    spec = _spec(case, q.ndim)
    try:
        sharded = q.with_sharding(NamedSharding(on, spec))
    except ValueError as e:
        # Blocks are not cut. (The message names specs that would do.)
        case.expect(f"{q} as {spec}: {e}", "nearest" in str(e), **names)
        return
    about = f"{q} as {spec} on {dict(on.shape)}, {on.axis_types[0]}, {rows} rows"
    case.expect(f"{about}: dequantize", equal(sharded.dequantize(), q.dequantize()))
    case.expect(f"{about}: placement", sharded.is_sharded == (_used(on, spec) > 1))
    x_spec = _fitting(x_shape, _spec(case, len(x_shape)), on)
    placed = jax.device_put(x, NamedSharding(on, x_spec))
    v_placed = jax.device_put(v, NamedSharding(on, P()))
    problem = problem_of(x, q)
    x64 = rounded(x, q.activation)
    expected = product(x64, w)
    error, provided = largest_error(problem)
    if provided and kind in weights.sparse:
        return
    explicit = on.axis_types[0] == AxisType.Explicit
    with jax.set_mesh(on):
        y = jax.jit(lambda x, q: x @ q)(placed, sharded)
    # (Each device may sum in the dtype of its part.)
    error += 2 * float(jnp.finfo(dtype).eps) * (dtype == jnp.bfloat16)
    note = f"{about} of x as {x_spec}"
    case.check(note, wrong(y, expected, error), **names, transform="sharded")
    error, provided = largest_error(problem, (True,), rounds=False)
    error += 2 * float(jnp.finfo(dtype).eps) * (dtype == jnp.bfloat16)
    expected = product(np.asarray(v, np.float64), np.swapaxes(w, -1, -2))
    if explicit or provided:
        return
    with jax.set_mesh(on):
        fn = lambda x, v, q: jax.vjp(lambda x: x @ q, x)[1](v)[0]
        dx = jax.jit(fn)(placed, v_placed, sharded)
    case.check(note, wrong(dx, expected, error), **names, transform="vjp, sharded")


def manual(case: Case) -> None:
    """Products within `shard_map`: rows, columns or contracted positions are split."""
    on = _mesh(case, AxisType.Auto)
    format, kind = draw_multiplied(case), case.pick(weights.kinds)
    shape, axis = case.pick(_sizes), case.pick((-2, -1))
    q = weights.draw_quantized(case, format, shape, kind, jnp.float32, axis=axis)
    x_kind, rows = case.pick(inputs.kinds), case.pick((8, 16, 40))
    x = inputs.draw_inputs(case, (rows, shape[0]), x_kind, jnp.float32)
    way = case.pick([*_manual])
    x_spec, w_spec, y_spec, fn = _manual[way]
    names = dict(
        kind="sharding",
        format=name_of(format),
        inputs=x_kind,
        weights=kind,
        transform=f"shard_map, {way}",
    )
    try:
        sharded = q.with_sharding(NamedSharding(on, w_spec))
    except ValueError as e:
        case.expect(f"{q} as {w_spec}: {e}", "nearest" in str(e), **names)
        return
    w_specs = jax.tree.map(lambda a: a.sharding.spec, sharded)
    mapped = jax.shard_map(fn, mesh=on, in_specs=(x_spec, w_specs), out_specs=y_spec)
    y = jax.jit(mapped)(x, sharded)
    error, provided = largest_error(problem_of(x, q))
    if not (provided and kind in weights.sparse):
        found = wrong(y, product(x, weights.dense(q)), error)
        case.check(f"{q} on {dict(on.shape)}, {rows} rows", found, **names)


def _matmul(x, q):
    return x @ q


_manual = {
    "rows": (P("a"), P(), P("a"), _matmul),
    "columns": (P(), P(None, "a"), P(None, "a"), _matmul),
    "contracted": (P(None, "a"), P("a"), P(), lambda x, q: lax.psum(x @ q, "a")),
    "both": (P("a"), P(None, "b"), P("a", "b"), _matmul),
}


def _mesh(case, type=None):
    shape = case.pick(((4, 2), (2, 4), (8, 1)))
    types = (type or case.pick((AxisType.Auto, AxisType.Explicit)),) * 2
    return jax.make_mesh(shape, ("a", "b"), axis_types=types)


def _spec(case, ndim):
    entries, left = [None] * ndim, {"a", "b"}
    for i in case.rng.permutation(ndim):
        entry = case.pick(_entries)
        used = set(entry or ())
        if used <= left:
            entries[int(i)], left = entry, left - used
    return P(*entries)


def _used(mesh: Any, spec: P) -> int:
    names = [name for entry in spec for name in entry or ()]
    return int(np.prod([mesh.shape[name] for name in names], dtype=int))


def _fitting(shape, spec, mesh):
    entries = [
        entry if size % _used(mesh, P(entry)) == 0 else None
        for size, entry in zip(shape, spec)
    ]
    return P(*entries)
