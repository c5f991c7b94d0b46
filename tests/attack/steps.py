"""Steps of a program: each takes a part of an array, or lays it otherwise. What is
drawn of a step for a shape is a function of the array and of integers that are traced,
which may be negative and out of range."""

import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .case import Case


Step = Callable[[Any, Any], Any]
# How many integers a program is given.
integers = 12
_takes_signs = (
    "allow_negative_indices" in inspect.signature(lax.dynamic_slice).parameters
)


def _axis(case, shape):
    return case.integer(0, len(shape) - 1)


def _some(case, number):
    # Which of the traced integers.
    start = case.integer(0, integers - number)
    return slice(start, start + number)


def _at(axis, index):
    return (*[slice(None)] * axis, index)


def _about(index, size):
    # From twice the size below zero to twice above: within, and beyond either end.
    return index % (4 * max(1, size)) - 2 * max(1, size)


def _transposed(case: Case, shape) -> Step:
    order = tuple(int(i) for i in case.rng.permutation(len(shape)))
    return lambda w, ids: w.transpose(order)


def _merged(case: Case, shape) -> Step | None:
    if len(shape) < 2:
        return None
    i = case.integer(0, len(shape) - 2)
    new = (*shape[:i], shape[i] * shape[i + 1], *shape[i + 2 :])
    return lambda w, ids: w.reshape(new)


def _parted(case: Case, shape) -> Step | None:
    i = _axis(case, shape)
    factors = [f for f in (2, 3, 4, 8, 16, 32) if shape[i] % f == 0 and shape[i] > f]
    if not factors or len(shape) > 4:
        return None
    f = case.pick(factors)
    new = (*shape[:i], *case.pick([(f, shape[i] // f), (shape[i] // f, f)]))
    new = (*new, *shape[i + 1 :])
    return lambda w, ids: w.reshape(new)


def _expanded(case: Case, shape) -> Step | None:
    i = case.integer(0, len(shape))
    return None if len(shape) > 4 else lambda w, ids: jnp.expand_dims(w, i)


def _squeezed(case: Case, shape) -> Step | None:
    ones = [i for i, size in enumerate(shape) if size == 1]
    i = case.pick(ones) if ones and len(shape) > 1 else None
    return None if i is None else lambda w, ids: jnp.squeeze(w, i)


def _sliced(case: Case, shape) -> Step:
    i = _axis(case, shape)
    part = slice(
        case.pick((None, 0, 1, -shape[i] // 2)),
        case.pick((None, shape[i], -1, shape[i] + 5)),
        case.pick((None, 1, 2, -1)),
    )
    return lambda w, ids: w[_at(i, part)]


def _index(case: Case, shape) -> Step | None:
    i = _axis(case, shape)
    if shape[i] == 0:
        return None
    index = case.integer(-shape[i], shape[i] - 1)
    return lambda w, ids: w[_at(i, index)]


def _traced_index(case: Case, shape) -> Step | None:
    i, j = _axis(case, shape), case.integer(0, integers - 1)
    if shape[i] == 0:
        return None
    return lambda w, ids: w[_at(i, _about(ids[j], shape[i]))]


def _dynamic_slice(case: Case, shape) -> Step:
    whole = case.chance(0.5)
    only = _axis(case, shape)
    sizes = [
        size if whole and i != only else case.integer(min(1, size), size)
        for i, size in enumerate(shape)
    ]
    at = _some(case, len(shape))
    signs = {}
    if _takes_signs and case.chance(0.4):
        signs["allow_negative_indices"] = case.chance(0.5)

    def fn(w, ids):
        starts = [_about(i, size) for i, size in zip(ids[at], shape)]
        return lax.dynamic_slice(w, starts, sizes, **signs)

    return fn


def _dynamic_index(case: Case, shape) -> Step | None:
    i, j, keeps = _axis(case, shape), case.integer(0, integers - 1), case.chance(0.5)
    if shape[i] == 0:
        return None

    def fn(w, ids):
        return lax.dynamic_index_in_dim(w, _about(ids[j], shape[i]), i, keeps)

    return fn


def _take(case: Case, shape) -> Step | None:
    i, at = _axis(case, shape), _some(case, case.pick((1, 2, 4)))
    mode = case.pick((None, "clip", "wrap", "fill"))
    square = case.chance(0.3) and at.stop - at.start == 4
    if shape[i] == 0:
        return None

    def fn(w, ids):
        some = _about(ids[at], shape[i])
        some = some.reshape(2, 2) if square else some
        return jnp.take(w, some, axis=i, mode=mode)

    return fn


def _gathered(case: Case, shape) -> Step | None:
    i, at = _axis(case, shape), _some(case, 3)
    if 0 in shape:
        return None
    number = 2 if i + 1 < len(shape) and case.chance(0.3) else 1

    def fn(w, ids):
        some = [_about(ids[at], size) for size in shape[i : i + number]]
        return w[(*[slice(None)] * i, *some)]

    return fn


def _flipped(case: Case, shape) -> Step:
    i = _axis(case, shape)
    return lambda w, ids: jnp.flip(w, i)


def _scaled(case: Case, shape) -> Step:
    factor = case.pick((0.5, 2.0, 4.0))
    return case.pick(
        (
            lambda w, ids: w * factor,
            lambda w, ids: factor * w,
            lambda w, ids: w / factor,
        )
    )


def _broadcast(case: Case, shape) -> Step | None:
    lead = case.pick(((2,), (3,), (1,)))
    return (
        None if len(shape) > 4 else lambda w, ids: jnp.broadcast_to(w, lead + w.shape)
    )


def _joined(case: Case, shape) -> Step:
    i = _axis(case, shape)
    if case.chance(0.5):
        return lambda w, ids: jnp.concatenate([w, jnp.flip(w, i)], i)
    return lambda w, ids: jnp.stack([w, w])[ids[0] % 2]


def _rolled(case: Case, shape) -> Step:
    i, j = _axis(case, shape), case.integer(0, integers - 1)
    return case.pick(
        (
            lambda w, ids: jnp.roll(w, 1, i),
            lambda w, ids: jnp.roll(w, ids[j], i),
            lambda w, ids: jnp.pad(w, [(1, 0)] * len(shape)),
            lambda w, ids: jnp.repeat(w, 2, axis=i),
        )
    )


def _cond(case: Case, shape) -> Step:
    i, j = _axis(case, shape), case.integer(0, integers - 1)

    def fn(w, ids):
        return lax.cond(ids[j] > 0, lambda w: jnp.flip(w, i), lambda w: w, w)

    return fn


def _switch(case: Case, shape) -> Step:
    j = case.integer(0, integers - 1)
    branches = [lambda w: w, lambda w: 2 * w, lambda w: w[::-1]]
    return lambda w, ids: lax.switch(ids[j], branches, w)


def _scan(case: Case, shape) -> Step | None:
    if len(shape) < 2 or shape[0] == 0:
        return None
    reverse = case.chance(0.3)

    def fn(w, ids):
        return lax.scan(lambda c, row: (c, 2 * row), 0, w, reverse=reverse)[1]

    return fn


def _loop(case: Case, shape) -> Step:
    if case.chance(0.5):
        return lambda w, ids: lax.fori_loop(0, 3, lambda i, w: w[::-1], w)

    def fn(w, ids):
        step = lambda c: (c[0] + 1, jnp.flip(c[1], 0))
        return lax.while_loop(lambda c: c[0] < ids[0] % 3, step, (0, w))[1]

    return fn


def _mapped(case: Case, shape) -> Step | None:
    if len(shape) < 2 or 0 in shape:
        return None
    i = _axis(case, shape)
    out = case.pick((0, i))
    return lambda w, ids: jax.vmap(lambda r: r[::-1], i, out)(w)


def _wrapped(wrap):
    def draw(case: Case, shape) -> Step | None:
        step = steps[case.pick([*steps])](case, shape)
        return None if step is None else lambda w, ids: wrap(step)(w, ids)

    return draw


steps: dict[str, Callable[[Case, tuple[int, ...]], Step | None]] = {
    "transpose": _transposed,
    "merge": _merged,
    "part": _parted,
    "expand_dims": _expanded,
    "squeeze": _squeezed,
    "slice": _sliced,
    "index": _index,
    "traced index": _traced_index,
    "dynamic_slice": _dynamic_slice,
    "dynamic_index": _dynamic_index,
    "take": _take,
    "gather": _gathered,
    "flip": _flipped,
    "scale": _scaled,
    "broadcast": _broadcast,
    "join": _joined,
    "roll": _rolled,
    "cond": _cond,
    "switch": _switch,
    "scan": _scan,
    "loop": _loop,
    "map": _mapped,
}
# What reads a part that is not known when compiling.
_often = ("traced index", "dynamic_slice", "dynamic_index", "take", "gather")
inner = {
    "jit": _wrapped(jax.jit),
    "checkpoint": _wrapped(jax.checkpoint),
}


def draw_steps(
    case: Case, shape: tuple[int, ...], number: int
) -> tuple[list[str], Step, tuple[int, ...]]:
    """Their names, one function of them all, and the shape of what it gives."""
    names, found = [], []
    every = steps | inner
    drawn = [*every, *_often, *_often]
    ids = jax.ShapeDtypeStruct((integers,), jnp.int32)
    for _ in range(number):
        name = case.pick(drawn)
        step = every[name](case, shape) if shape else None
        if step is None:
            continue
        new = jax.eval_shape(step, jax.ShapeDtypeStruct(shape, jnp.float32), ids).shape
        if math.prod(new) > 2**17 or len(new) > 5:
            continue
        names.append(name)
        found.append(step)
        shape = new

    def all_steps(w, ids):
        for step in found:
            w = step(w, ids)
        return w

    return names, all_steps, shape
