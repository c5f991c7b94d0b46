import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import QuantizedArray, squares_of_rows, SquareSums, total, unit_of
from ...formats import (
    AbstractExact,
    AbstractFormat,
    encode_rows,
    Layout,
    not_held_text,
)
from ._pieces import Pieces


def encoded_struct(
    format: AbstractFormat, shape: tuple[int, ...], dtype: Any, axis: int
) -> QuantizedArray:
    """A quantized array without its numbers, whose NumPy arrays take no memory. They
    lie in rows, as those of `encode`."""
    *lead, n, k = _by_row(shape, axis)
    stored = format.structs((*lead, n, k))
    return _array(
        jtu.tree_map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), stored),
        Layout(format).trimmed(stored, k),
        axis,
        dtype,
    )


def encode(
    w: np.ndarray,
    format: AbstractFormat,
    axis: int,
    advance: Callable[[float], None],
) -> tuple[QuantizedArray, SquareSums]:
    """Quantizes as [`eqquant.quantize`][], bit for bit, but some rows at a time.

    **Arguments:**

    - `w`: a matrix, or a stack of them, which may be a memory map.
    - `format`, `axis`: as for `quantize`.
    - `advance`: called with the share of `w` that is done since the last call.

    **Returns:**

    A quantized array of NumPy arrays, which lie in rows, and the sums of the squares of
    `w` and of its errors.

    **Raises:**

    A `ValueError` if there are numbers that the format cannot have.
    """
    rows = w if axis == -1 else w.swapaxes(-1, -2)
    structs = format.structs(rows.shape)
    layout = Layout(format).trimmed(structs, rows.shape[-1])
    pieces = Pieces(rows, _is_whole(format, rows.shape[-1]))
    known = _known(format, rows.shape, pieces)
    stored = jtu.tree_map(lambda a: np.empty(a.shape, a.dtype), structs)
    some, *_ = known.values()
    shapes = tuple(x.shape for x in some)
    _compile(layout, pieces.shape, pieces.dtype, shapes)

    def work(piece, index, rows):
        found = _encode(format, piece, known[index])
        sums, others, beyond = _measure(layout, piece, found)
        jtu.tree_map(
            lambda all, some: _put(all[index], rows, np.asarray(some)), stored, found
        )
        return total(*sums), int(others), int(beyond)

    signal = noise = 0.0
    wrong = lost = 0
    for (sums, others, beyond), share in pieces.map(work):
        signal += sums.signal
        noise += sums.noise
        wrong += others
        lost += beyond
        advance(share)
    if wrong == 0 and lost > 0:
        raise ValueError(
            f"It has numbers that are too large for {format}: {lost} of its {w.size} "
            f"would become NaN. {not_held_text(format)}"
        )
    if wrong > 0:
        raise ValueError(
            f"{_wanted(format)} {wrong} of its {w.size} numbers are not. A rule can "
            "leave it out."
        )
    return _array(stored, layout, axis, w.dtype), SquareSums(signal, noise)


def _known(format, shape, pieces):
    # For each matrix, the reductions over all its rows that the format needs.
    *lead, n, k = shape
    known = {index: () for index in np.ndindex(*lead)}
    for _ in range(_asks(format, k)):
        found = {index: [] for index in known}

        def work(piece, index, rows):
            x = np.asarray(_asked(format, piece, known[index]))
            return index, x[: rows.stop - rows.start]

        for (index, x), _ in pieces.map(work):
            found[index].append(x)
        known = {
            index: (*some, jnp.concatenate(found[index]))
            for index, some in known.items()
        }
    return known


def _array(stored, layout, axis, dtype):
    return QuantizedArray(
        stored=stored,
        layout=layout,
        axis=axis,
        sharding=None,
        activation=None,
        dtype=jax.dtypes.canonicalize_dtype(dtype),
    )


def _by_row(shape, axis):
    *lead, n, k = shape
    return (*lead, n, k) if axis == -1 else (*lead, k, n)


@ft.cache
def _asks(format, k):
    # The number of reductions over all rows that the format needs.
    struct = jax.ShapeDtypeStruct((2, k), np.float32)
    _, asked = jax.eval_shape(ft.partial(encode_rows, format), struct)
    return len(asked)


@ft.cache
def _is_whole(format, k):
    # Whether rows share stored numbers in another way than by these reductions.
    if _asks(format, k) > 0:
        return False
    struct = jax.ShapeDtypeStruct((2, k), np.float32)
    jaxpr = jax.make_jaxpr(format.encode)(struct).jaxpr
    of_numbers = {id(x) for x in jaxpr.invars}
    for equation in jaxpr.eqns:
        if any(id(x) in of_numbers for x in equation.invars):
            of_numbers |= {id(x) for x in equation.outvars}
    return any(x.aval.shape[-2] != 2 and id(x) in of_numbers for x in jaxpr.outvars)


def _put(all, rows, some):
    if len(all) == 1:
        all[...] = some[:1]
    else:
        all[rows] = some[: rows.stop - rows.start]


@ft.cache
def _compile(layout, shape, dtype, shapes):
    # Before the threads start, so that they do not compile it several times.
    w = np.zeros(shape, dtype)
    known = tuple(jnp.zeros(shape) for shape in shapes)
    _measure(layout, w, _encode(layout.format, w, known))


@ft.partial(jax.jit, static_argnums=0)
def _asked(format, w, known):
    _, asked = encode_rows(format, w, known)
    return asked[len(known)]


@ft.partial(jax.jit, static_argnums=0)
def _encode(format, w, known):
    stored, _ = encode_rows(format, w, known)
    return stored


@ft.partial(jax.jit, static_argnums=0)
def _measure(layout, w, stored):
    format = layout.format
    wrong = ~jnp.isfinite(w)
    if isinstance(format, AbstractExact):
        wrong |= format.is_outside(w)
    decoded = layout.decode(stored)
    lost = ~jnp.isfinite(decoded.astype(w.dtype))
    w, unit = w.astype(jnp.float32), unit_of(w)
    signal = squares_of_rows(w, jnp.float32(0), unit)
    sums = signal, squares_of_rows(w, decoded, unit), unit
    return sums, jnp.sum(wrong), jnp.sum(lost)


def _wanted(format):
    if isinstance(format, AbstractExact):
        return f"For {format}, its numbers should be {format.domain_text}."
    return "Its numbers should be finite."
