import functools as ft
import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import QuantizedArray
from ...formats import AbstractExact, AbstractFormat, Stored


# So many numbers at a time: few enough for the caches of a processor, and for their
# memory to be nothing beside that of the interpreter.
_numbers = 2**18
_workers = min(4, os.cpu_count() or 1)


class Error(NamedTuple):
    """The sums of the squares of some numbers, and of what they differ by from those
    that are stored for them."""

    signal: float
    noise: float

    @property
    def sqnr(self) -> float:
        """The signal-to-quantization-noise ratio, in decibels."""
        if self.noise == 0:
            return math.inf
        if self.signal == 0:
            return -math.inf
        return 10 * math.log10(self.signal / self.noise)


def stand_in(
    format: AbstractFormat, shape: tuple[int, ...], dtype: Any, axis: int
) -> QuantizedArray:
    """A quantized array whose stored arrays lie in rows, as in a file, and take no
    memory."""
    *lead, n, k = _by_row(shape, axis)
    stored = _structs(format, (*lead, n, k))
    return _array(
        jtu.tree_map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), stored),
        format.shape(stored, 0)[-1] - k,
        (format, axis, dtype),
    )


def encode(
    w: np.ndarray,
    format: AbstractFormat,
    axis: int,
    advance: Callable[[float], None],
) -> tuple[QuantizedArray, Error]:
    """As [`eqquant.quantize`][], bit for bit, some rows at a time: of NumPy's arrays,
    that lie in rows. And how far that is from what it was.

    **Arguments:**

    - `w`: a matrix, or a stack of them, that may be a memory map.
    - `advance`: is told what share of it was done, each time.

    **Raises:**

    A `ValueError` if there are numbers that the format does not take.
    """
    rows = w if axis == -1 else w.swapaxes(-1, -2)
    *lead, n, k = rows.shape
    structs = _structs(format, rows.shape)
    tail = format.shape(structs, 0)[-1] - k
    step = n if _is_shared(format, k) else _step(n, k)
    stored = jtu.tree_map(lambda a: np.empty(a.shape, a.dtype), structs)
    places = [(i, j) for i in np.ndindex(*lead) for j in range(0, n, step)]

    # Each is used over and over: JAX keeps its hold of arrays that it was given, for
    # longer than it needs them, and so it may not be given the memory map.
    buffers = SimpleQueue()
    for _ in range(min(_workers, len(places))):
        buffers.put(np.zeros((step, k), w.dtype))

    def work(place):
        index, start = place
        number = min(step, n - start)
        buffer = buffers.get()
        buffer[:number] = rows[index][start : start + number]
        buffer[number:] = 0
        found = _encode(format, buffer)
        measured = _measure(format, buffer, found, tail)
        jtu.tree_map(
            lambda all, some: _put(all[index], start, number, np.asarray(some)),
            stored,
            found,
        )
        measured = [np.asarray(x) for x in measured]
        buffers.put(buffer)
        return *measured, number / (n * math.prod(lead))

    _compile(format, (step, k), w.dtype, tail)
    signal = noise = 0.0
    wrong = 0
    for signals, noises, unit, others, share in _pool().map(work, places):
        signal += float(np.sum(signals, dtype=np.float64)) / float(unit) ** 2
        noise += float(np.sum(noises, dtype=np.float64)) / float(unit) ** 2
        wrong += int(others)
        advance(share)
    if wrong > 0:
        raise ValueError(
            f"{_wanted(format)} {wrong} of its {w.size} numbers are others. A rule may "
            "leave it as it is."
        )
    return _array(stored, tail, (format, axis, w.dtype)), Error(signal, noise)


def _array(stored, tail, rest):
    format, axis, dtype = rest
    return QuantizedArray(
        stored=stored,
        format=format,
        axis=axis,
        tail=tail,
        row_axis=-2,
        sharding=None,
        activation=None,
        dtype=jax.dtypes.canonicalize_dtype(dtype),
    )


def _by_row(shape, axis):
    *lead, n, k = shape
    return (*lead, n, k) if axis == -1 else (*lead, k, n)


@ft.cache
def _pool():
    return ThreadPoolExecutor(_workers)


@ft.cache
def _structs(format, shape) -> Stored:
    return jax.eval_shape(format.encode, jax.ShapeDtypeStruct(shape, np.float32))


def _is_shared(format, k):
    # Whether there is something that all rows share, which no part of them can tell.
    structs = jtu.tree_leaves(_structs(format, (2, k)))
    return any(a.shape[-2] != 2 for a in structs)


def _step(n, k):
    # Of few different sizes, so that little has to be compiled.
    return min(max(1, _numbers // k), 1 << (n - 1).bit_length())


def _put(all, start, number, some):
    if len(all) == 1:
        all[...] = some[:1]
    else:
        all[start : start + number] = some[:number]


@ft.cache
def _compile(format, shape, dtype, tail):
    # Once, and not in each thread.
    w = np.zeros(shape, dtype)
    _measure(format, w, _encode(format, w), tail)


@ft.partial(jax.jit, static_argnums=0)
def _encode(format, w):
    return format.encode(w)


@ft.partial(jax.jit, static_argnums=(0, 3))
def _measure(format, w, stored, tail):
    wrong = ~jnp.isfinite(w)
    if isinstance(format, AbstractExact):
        wrong |= format.is_outside(w)
    w = w.astype(jnp.float32)
    # Squares of numbers near one stay within float32; powers of two change no digits.
    _, exponent = jnp.frexp(jnp.max(jnp.abs(w)))
    unit = jnp.ldexp(jnp.ones((), w.dtype), jnp.clip(-exponent, -126, 126))
    difference = w * unit - format.decode(stored, tail) * unit
    signal = jnp.sum(jnp.square(w * unit), axis=-1)
    noise = jnp.sum(jnp.square(difference), axis=-1)
    return signal, noise, unit, jnp.sum(wrong)


def _wanted(format):
    if isinstance(format, AbstractExact):
        return f"{format} has no numbers but {format.domain_text}."
    return "Its numbers should be finite."
