"""Writes into an array, which may be `writable`: in all ways that JAX has."""

import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import eqquant as eqq

from . import weights
from .case import Case
from .formats import draw_format, name_of


_shapes = ((6, 32), (5, 3, 32), (2, 4, 48), (3, 4, 2, 16), (1, 64), (7, 33))
# Those that put numbers in the place of others.
_puts = ("set", "dynamic_update_slice", "concatenate")
_computes = ("add", "subtract", "multiply", "divide", "power", "min", "max", "apply")
_modes = (None, "clip", "drop", "fill", "promise_in_bounds")


def writes(case: Case) -> None:
    """A function that writes into an array, by `implicit` of a quantized one. Blocks
    that are written while it is packed are those of `quantize`, and others stay as they
    were, bit for bit."""
    shape, format = case.pick(_shapes), draw_format(case)
    axis = case.pick((-1, -1, -2, -len(shape)))
    writable, dtype = case.chance(0.8), case.pick((jnp.float32, jnp.bfloat16))
    w = weights.draw_weight(case, shape, "normal", format, dtype)
    q = eqq.quantize(w, format, axis=axis, writable=writable)
    name = case.pick((*_puts, *_puts, *_puts, "set", *_computes))
    about, fn, new_shape, ids = _draw_write(case, name, shape)
    new = weights.draw_weight(case, new_shape, "normal", format, dtype)
    how = case.pick([*_ways])
    found = _ways[how](eqq.implicit, fn)(q, new, ids)
    dense = q.dequantize()
    run = jax.jit(_ways[how](lambda fn: fn, fn))
    expected = np.asarray(run(dense, new, ids), np.float32)
    packed = eqq.is_quantized(found)
    names = dict(
        kind="write",
        format=name_of(format),
        transform=f"implicit, {how}",
        write=f"{name}, {'packed' if packed else 'dense'}",
    )
    note = f"{about}, {how}, of {q}"
    found = np.asarray(found.dequantize() if packed else found, np.float32)
    # (Of numbers that are computed, XLA fuses products and sums.)
    tolerance = 0 if name in _puts else 1e-2 if dtype == jnp.bfloat16 else 1e-6
    differs = ~np.isclose(found, expected, tolerance, tolerance, equal_nan=True)
    if packed:
        case.expect(f"{note}: packed", writable and name in _puts, **names)
    if writable and name in _puts and (packed or np.any(differs)):
        # (What is packed when it is written may be decoded in the end.)
        again = jax.jit(ft.partial(_rounded, format=format, axis=axis))
        rounded = np.asarray(again(jnp.asarray(expected, dtype)), np.float32)
        ones = [jnp.full(a.shape, i, dtype) for i, a in enumerate((dense, new))]
        written = np.asarray(run(*ones, ids), np.float32) == 1
        differs = found != np.where(written, rounded, expected)
    wrong = int(np.sum(differs))
    case.check(note, f"{wrong} numbers are wrong" if wrong else None, **names)


def _rounded(w, format, axis):
    return eqq.quantize(w, format, axis=axis).dequantize()


def _draw_write(case, name, shape) -> tuple[str, Callable, tuple[int, ...], Any]:
    # What it is, a function of an array, of what is written and of integers, and the
    # shape of what is written.
    if name == "concatenate":
        i = case.integer(0, len(shape) - 1)
        more = tuple(case.integer(1, 3) if j == i else n for j, n in enumerate(shape))
        first = case.chance(0.3)

        def join(w, new, ids):
            return jnp.concatenate([new, w] if first else [w, new], i)

        return f"concatenate along {i}", join, more, np.zeros(1, np.int32)
    if name == "dynamic_update_slice":
        only = case.integer(0, len(shape) - 1)
        sizes = tuple(
            case.integer(1, n) if i == only or case.chance(0.1) else n
            for i, n in enumerate(shape)
        )
        starts = np.asarray([case.integer(-n, 2 * n) for n in shape], np.int32)

        def update(w, new, ids):
            return lax.dynamic_update_slice(w, new, [*ids])

        return f"dynamic_update_slice of {sizes} at {starts}", update, sizes, starts
    return _draw_scatter(case, name, shape)


def _draw_scatter(case, name, shape):
    number = case.integer(1, 3)
    mode = case.pick(_modes)
    inside = mode == "promise_in_bounds"
    axes = [int(i) for i in case.rng.permutation(len(shape))]
    axes = axes[: case.pick((1, 1, 1, 2))]
    options, columns, index = {}, [], []
    for i, n in enumerate(shape):
        kind = "all"
        if i in axes:
            kind = case.pick(("one", "many", "many", "part", "every"))
        if kind == "part":
            start = case.integer(0, n - 1)
            part = slice(start, case.integer(start + 1, n), case.pick((None, 2)))
            index.append(part if case.chance(0.7) else slice(None, None, -1))
        elif kind in ("one", "many"):
            low, high = (0, n - 1) if inside else (-2 * n, 2 * n)
            values = [case.integer(low, high) for _ in range(number)]
            values = sorted(values) if case.chance(0.3) else values
            columns.append(values)
            index.append(("ids", len(columns) - 1, kind))
        else:
            index.append(slice(None))
    ids = np.asarray(columns or [[0]], np.int32)
    # What is promised of indices has to be so: they are those of one axis, within it.
    many = [part for part in index if isinstance(part, tuple) and part[2] == "many"]
    if len(columns) == len(many) == 1:
        (values,) = columns
        positive = min(values) >= 0
        if positive and values == sorted(values):
            options["indices_are_sorted"] = case.chance(0.7)
        n = shape[next(i for i, part in enumerate(index) if isinstance(part, tuple))]
        if positive and len({*values}) == number and max(values) < n:
            options["unique_indices"] = case.chance(0.7)

    def at(ids):
        def part(p):
            if not isinstance(p, tuple):
                return p
            _, j, kind = p
            return ids[j] if kind == "many" else ids[j, 0]

        return tuple(map(part, index))

    part = jax.eval_shape(
        lambda w, ids: w[at(ids)], jax.ShapeDtypeStruct(shape, jnp.float32), ids
    )
    scalar = case.chance(0.1)

    def write(w, new, ids):
        ref = w.at[at(ids)]
        if name == "apply":
            return ref.apply(jnp.tanh, mode=mode, **options)
        if name == "power":
            new = 2 + jnp.round(jnp.abs(new))
        if name == "divide":
            new = 1 + jnp.abs(new)
        return getattr(ref, name)(new, mode=mode, **options)

    about = f".at[{index}].{name} at {ids.tolist()}, {mode}, {options}"
    return about, write, () if scalar else part.shape, ids


def _looped(make, fn):
    # As a cache is: carried, and written in each step.
    def run(w, new, ids):
        if jax.eval_shape(fn, w, new, ids).shape != w.shape:
            return fn(w, new, ids)
        return lax.fori_loop(0, 2, lambda _, w: fn(w, new, ids), w)

    return jax.jit(make(run))


def _mapped(make, fn):
    # (As a batch of one.)
    def run(w, new, ids):
        return jax.vmap(fn, (0, 0, None))(w[None], new[None], ids)[0]

    return jax.jit(make(run))


def _mapped_ids(make, fn):
    # At places of its own for each.
    def run(w, new, ids):
        return jax.vmap(fn)(w[None], new[None], ids[None])[0]

    return jax.jit(make(run))


# From what makes a function one of quantized arrays, and from the function.
_ways: dict[str, Callable] = {
    "eager": lambda make, fn: make(fn),
    "jit": lambda make, fn: jax.jit(make(fn)),
    "loop": _looped,
    "vmap": _mapped,
    "vmap of places": _mapped_ids,
    "remat": lambda make, fn: jax.jit(make(jax.checkpoint(fn))),
}
