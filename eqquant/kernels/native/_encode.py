import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, UInt

from ...formats import (
    AbstractFormat,
    AbstractK,
    AbstractTiled,
    IntegerSearch,
    IQ4_NL,
    PointSearch,
    RangeSearch,
    Stored,
    Trellis,
)
from . import _library as library


# In the order of `NumberType` in `src/arrays/encode.h`.
_dtypes = (jnp.float32, jnp.bfloat16, jnp.float16)
# Scales of larger numbers may not fit into float16.
most_encoded = 256.0


def encoder(
    format: AbstractFormat, dtype: Any, across: bool
) -> Callable[..., Stored] | None:
    """Returns a function `encode(format, w)` that finds the same bits as
    `format.encode(w)`, for matrices on one CPU. `None` if there is no faster function.
    Equal arguments give the same function. No absolute value should be larger than
    `most_encoded`, and a program with this function should not run elsewhere.

    - `dtype`: the dtype of the numbers.
    - `across`: whether they are given as `*b k n`, not `*b n k`.
    """
    known = isinstance(format, AbstractK | IQ4_NL | Trellis) and dtype in _dtypes
    if not known or library.missing() is not None:
        return None
    if isinstance(format, Trellis):
        return _tiles_across if across else _tiles_along
    return _across if across else _along


def _encode(format: AbstractK | IQ4_NL, w: Float[Array, "..."], across: bool) -> Stored:
    *lead, n, k = w.shape
    n, k = (k, n) if across else (n, k)
    size = -(-k // format.block_size) * format.type_size
    result = jax.ShapeDtypeStruct((*lead, size, n), jnp.uint8)
    call = jax.ffi.ffi_call("eqquant_encode", result)
    blocks = call(w, across=across, **_attributes(format))
    stored = format.from_blocks(blocks.swapaxes(-1, -2))
    tail = -k % format.block_size
    if isinstance(format, IQ4_NL) and tail > 0:
        codes = format.unpack(stored["codes"], tail)
        stored = stored | {"codes": format.pack(codes)}
    return stored


_across = ft.partial(_encode, across=True)
_along = ft.partial(_encode, across=False)


def _encode_tiles(format: Trellis, w: Float[Array, "..."], across: bool) -> Stored:
    w = w.swapaxes(-1, -2) if across else w
    return format.encode_by(ft.partial(_nearest_codes, format), w)


_tiles_across = ft.partial(_encode_tiles, across=True)
_tiles_along = ft.partial(_encode_tiles, across=False)


def _nearest_codes(format: Trellis, units: Int[Array, "*b t"]) -> UInt[Array, "*b w"]:
    *lead, t = units.shape
    result = jax.ShapeDtypeStruct((*lead, t * format.bits // 32), jnp.uint32)
    return jax.ffi.ffi_call("eqquant_encode_tiles", result)(
        units,
        format.every_point.astype(np.int16),
        tile=np.int64(format.tile),
        states=np.int32(format.states),
        bits=np.int32(format.bits),
    )


def tile_encoder(
    format: AbstractTiled,
) -> Callable[..., UInt[Array, "n w"]] | None:
    """A function of the format and the arguments of its `nearest_tile` that finds codes
    which are as good, on a CPU. `None` if there is none that is faster. A program with
    it should not be run elsewhere."""
    if not isinstance(format, Trellis) or library.missing() is not None:
        return None
    return _nearest_tile


def _nearest_tile(format: Trellis, *args: Float[Array, "..."]) -> UInt[Array, "n w"]:
    return format.nearest_tile_by(ft.partial(_codes_with_feedback, format), *args)


def _codes_with_feedback(
    format: Trellis, w: Float[Array, "n t"], *others: Float[Array, "..."]
) -> UInt[Array, "n w"]:
    n, t = w.shape
    result = jax.ShapeDtypeStruct((n, t * format.bits // 32), jnp.uint32)
    return jax.ffi.ffi_call("eqquant_encode_with_feedback", result)(
        w,
        *others,
        format.every_point.astype(np.int16),
        states=np.int32(format.states),
        bits=np.int32(format.bits),
    )


@ft.cache
def _attributes(format: AbstractK | IQ4_NL) -> dict[str, Any]:
    # The fields of `Encoding`.
    search, block = format.search, format.block_size
    if isinstance(format, AbstractK):
        fields, halves = format.fields, format.halves
        codes, integers = fields.codes, (*fields.steps, *fields.lows)
        part, steps, zero = block // len(fields.steps), format.steps, fields.zero
    else:
        codes, integers, halves = format.fields, (), 1
        part, steps, zero = block, 0, 0
    bits = [
        (i, field.at, field.number, field.byte, field.start)
        for i, code in enumerate((*codes, *integers))
        for field in code
    ]
    first = len(codes) + 2 * (block // part)
    bits += [(first + i, 0, 8, format.scale_at + i, 0) for i in range(2 * halves)]
    match search:
        case IntegerSearch(half):
            kind, number, points = 0, 2 * half, ()
        case PointSearch(points, _):
            kind, number = 1, len(points)
        case RangeSearch(most, absolute=absolute):
            kind, number, points = 2 + absolute, most + 1, ()
    return dict(
        block=np.int64(block),
        part=np.int64(part),
        repeats=isinstance(format, AbstractK),
        search=np.int32(kind),
        factors=search.factors,
        points=np.array(points, np.float32),
        codes=np.int32(number),
        steps=np.int32(steps),
        zero=np.int32(zero),
        bytes=np.int64(format.type_size),
        bits=np.array(sorted(bits, key=lambda b: b[3]), np.int32).reshape(-1),
    )
