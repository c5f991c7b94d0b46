import functools as ft
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from ..._array import QuantizedArray, squares_of_rows, SquareSums, total, unit_of
from ..._product import as_tuple, Axis
from ...formats import (
    AbstractExact,
    AbstractFormat,
    encode_rows,
    Layout,
    not_held_text,
)
from ...kernels import encoder, most_encoded
from ._pieces import Pieces


def encoded_struct(
    format: AbstractFormat, shape: tuple[int, ...], dtype: Any, axis: Axis
) -> QuantizedArray:
    """Returns a quantized array of zeros, whose NumPy arrays take no memory. They are
    stored in rows, like the result of `encode`."""
    rows = _by_row(np.broadcast_to(np.zeros((), dtype), shape), axis)
    stored = format.structs(rows.shape)
    return _array(
        jtu.tree_map(lambda a: np.broadcast_to(np.zeros((), a.dtype), a.shape), stored),
        Layout(format).trimmed(stored, rows.shape[-1]),
        axis,
        shape,
        dtype,
    )


def encode(
    w: np.ndarray,
    format: AbstractFormat,
    axis: Axis,
    advance: Callable[[float], None],
) -> tuple[QuantizedArray, SquareSums]:
    """Quantizes some rows at a time. Returns a quantized array of NumPy arrays, which
    are stored in rows, and the sums of the squares of `w` and of its errors. The array
    is bit-identical to [`eqquant.quantize`][]. Raises a `ValueError` if `w` has numbers
    that the format cannot represent.

    - `w`: a matrix, a stack of matrices, or a filter. It may be a memory map.
    - `format`, `axis`: as in `quantize`.
    - `advance`: called with the share of `w` that is done since the last call.
    """
    rows = _by_row(w, axis)
    structs = format.structs(rows.shape)
    layout = Layout(format).trimmed(structs, rows.shape[-1])
    pieces = Pieces(rows, _is_whole(format, rows.shape[-1]))
    known = _known(format, rows.shape, pieces)
    stored = jtu.tree_map(lambda a: np.empty(a.shape, a.dtype), structs)
    some, *_ = known.values()
    shapes = tuple(x.shape for x in some)
    native = _native(format, pieces.dtype)
    _compile(layout, pieces.shape, pieces.dtype, shapes, native)

    def work(piece, index, rows):
        how = native if native is not None and _is_ordinary(piece) else None
        found = _encode(format, piece, known[index], how)
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
    return _array(stored, layout, axis, w.shape, w.dtype), SquareSums(signal, noise)


def _known(format, shape, pieces):
    # Computes, for each matrix, the reductions over all its rows that the format needs.
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


def _array(stored, layout, axis, shape, dtype):
    return QuantizedArray(
        stored=stored,
        layout=layout,
        axis=axis,
        sharding=None,
        activation=None,
        dtype=jax.dtypes.canonicalize_dtype(dtype),
        inner=tuple(shape[i] for i in as_tuple(axis)[1:]),
    )


def _by_row(w, axis):
    # Moves the contracted axes to the end, and merges them. (This is a view, except for
    # unusual axes.)
    axes = as_tuple(axis)
    w = np.moveaxis(w, axes, range(-len(axes), 0))
    lead = w.shape[: -len(axes)]
    return w.reshape(*lead, math.prod(w.shape[-len(axes) :]))


@ft.cache
def _asks(format, k):
    # Returns the number of reductions over all rows that the format needs.
    struct = jax.ShapeDtypeStruct((2, k), np.float32)
    _, asked = jax.eval_shape(ft.partial(encode_rows, format), struct)
    return len(asked)


@ft.cache
def _is_whole(format, k):
    # Whether rows share stored numbers in another way than by these reductions, so that
    # a matrix must be encoded as a whole.
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
def _compile(layout, shape, dtype, shapes, native):
    # Compiles before the threads start, so that they do not compile several times.
    w = np.zeros(shape, dtype)
    known = tuple(jnp.zeros(shape) for shape in shapes)
    _measure(layout, w, _encode(layout.format, w, known, native))


@ft.partial(jax.jit, static_argnums=0)
def _asked(format, w, known):
    _, asked = encode_rows(format, w, known)
    return asked[len(known)]


def _native(format, dtype):
    # Returns the native function that encodes ordinary numbers faster, or `None`.
    on_cpu = next(iter(jnp.zeros(()).devices())).platform == "cpu"
    return encoder(format, dtype, across=False) if on_cpu else None


@jax.jit
def _is_ordinary(w):
    return jnp.all(jnp.abs(w) <= most_encoded)


@ft.partial(jax.jit, static_argnums=(0, 3))
def _encode(format, w, known, native):
    if native is not None:
        return native(format, w)
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
