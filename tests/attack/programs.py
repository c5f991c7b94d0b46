import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import eqquant as eqq

from . import inputs, weights
from .case import Case
from .ends import draw_end
from .formats import draw_activation, draw_multiplied, name_of
from .oracle import Expected, wrong
from .steps import draw_steps, integers


_shapes = ((8, 48), (33, 32), (64, 64), (4, 32, 16), (3, 16, 64), (2, 3, 32, 48))
_shapes += ((48,), (6, 5, 3, 3), (8, 4, 5), (1, 32), (4, 17, 31), (5, 256, 8))


def _axis(case, shape):
    # Mostly that of a product; any other, and several, too.
    if len(shape) > 1 and case.chance(0.25):
        number = case.integer(1, len(shape) - 1)
        return tuple(int(i) for i in case.rng.permutation(len(shape))[:number])
    return case.integer(-min(2, len(shape)), -1)


def programs(case: Case) -> None:
    """A function of dense arrays, by `implicit` of quantized ones."""
    shape, format = case.pick(_shapes), draw_multiplied(case)
    kind = case.pick(("normal", "normal", "normal", "sparse", "not finite"))
    axis = _axis(case, shape)
    names, steps, end_shape = draw_steps(case, shape, case.integer(0, 4))
    end = draw_end(case, end_shape)
    ragged = end.name.startswith("ragged_dot")
    if (ragged or end.name == "conv") and kind == "not finite":
        # (Whether NaNs meet the zeros of other groups, or of a margin, is up to XLA.)
        kind = "normal"
    # (What is rounded row by row depends on what the rows are taken to be.)
    activation = draw_activation(case) if end.name == "itself" else None
    q = weights.draw_quantized(
        case, format, shape, kind, jnp.float32, axis=axis, activation=activation
    )

    def fn(x, w, ids):
        return end.fn(x, steps(w, ids))

    # (JAX does not map `ragged_dot`, and has derivatives of its first mode alone.)
    ways = [way for way in _ways if way != "vmap" or not ragged]
    ways = ["eager", "jit"] if ragged and end.name != "ragged_dot" else ways
    how = case.pick(ways if end.x_shape is not None else ["eager", "jit"])
    ids = jnp.asarray(case.rng.integers(-1000, 1000, integers), jnp.int32)
    if ragged or end.name == "conv":
        ids = jnp.zeros_like(ids)  # What is out of range may be NaN as well.
    x_kind = case.pick(("normal", "normal", "heavy tails", "integers", "zeros"))
    x_shape = end.x_shape or (1,)
    x = inputs.draw_inputs(case, x_shape, x_kind, jnp.float32)
    y_shape = jax.eval_shape(fn, x, jax.ShapeDtypeStruct(shape, x.dtype), ids).shape
    v = inputs.draw_inputs(case, y_shape, "normal", jnp.float32)
    found = _ways[how](eqq.implicit, fn)(x, q, ids, v)
    found = found.dequantize() if eqq.is_quantized(found) else found
    expected = _expected(_ways[how](lambda fn: fn, fn), x, q, ids, v)
    error = 0.0 if end.name == "itself" else 2e-5 * (1 + math.isqrt(max(shape)))
    program = " > ".join([*names, end.name])
    case.check(
        f"{program}, {how}, of {q}, ids {ids.tolist()}",
        wrong(found, expected, error),
        kind="program",
        format=name_of(format),
        transform=f"implicit, {how}",
        inputs=x_kind,
        weights=kind,
    )


def _expected(fn: Callable, x: Any, q: Any, ids: Any, v: Any) -> Expected:
    # By JAX in float64, of ordinary arrays: what steps mean is as JAX has it.
    w = weights.dense(q)
    x, v = np.asarray(x, np.float64), np.asarray(v, np.float64)
    known = np.where(np.isfinite(w), w, 0)
    with jax.enable_x64(True):
        run = jax.jit(fn)
        value = np.asarray(run(x, w, ids, v))
        size = np.asarray(run(np.abs(x), np.abs(known), ids, np.abs(v)))
        finite = np.asarray(run(x, known, ids, v))
    size = np.where(np.isfinite(size), size, 0)
    wild = np.where(np.isfinite(value), 0, value)
    value = np.where(np.isfinite(value), value, np.nan_to_num(finite, nan=0))
    slack = np.full(size.shape, 1e-30)
    return Expected(value, size, slack, wild, np.zeros(size.shape, bool))


# From what makes a function one of quantized arrays, and from the function.
_ways: dict[str, Callable] = {
    "eager": lambda make, fn: lambda x, w, ids, v: make(fn)(x, w, ids),
    "jit": lambda make, fn: jax.jit(lambda x, w, ids, v: make(fn)(x, w, ids)),
    "vmap": lambda make, fn: jax.jit(
        lambda x, w, ids, v: jax.vmap(lambda x: make(fn)(x, w, ids))(x[None])[0]
    ),
    "vjp of it": lambda make, fn: jax.jit(
        lambda x, w, ids, v: jax.vjp(lambda x: make(fn)(x, w, ids), x)[1](v)[0]
    ),
    "of vjp": lambda make, fn: jax.jit(
        make(lambda x, w, ids, v: jax.vjp(lambda x: fn(x, w, ids), x)[1](v)[0])
    ),
    "of jvp": lambda make, fn: jax.jit(
        make(lambda x, w, ids, v: jax.jvp(lambda x: fn(x, w, ids), (x,), (x,))[1])
    ),
    "of remat": lambda make, fn: jax.jit(
        make(
            lambda x, w, ids, v: jax.vjp(jax.checkpoint(lambda x: fn(x, w, ids)), x)[1](
                v
            )[0]
        )
    ),
}
