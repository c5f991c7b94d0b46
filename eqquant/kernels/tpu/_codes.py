from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8 as I8, Integer, Shaped, UInt8, UInt32

from ...formats import AbstractGrid, Binary, Int8, Ternary
from .._problem import Problem


# Bytes are decoded 32 bits at a time, with four rows of bytes in a word: a TPU has no
# arithmetic of narrower integers, but can reinterpret registers at no cost. The results
# are planes: the first codes of all bytes, the second codes, and so on. This permutes
# the contracted axis, so inputs are permuted alike (`to_planes`).


class Decoder(NamedTuple):
    """Decodes a tile of bytes.

    - `planes`: the number of planes.
    - `decode`: `(bytes, zero-points or None) -> planes`.
    - `unit`: the value of a one in a plane, in units of the scale.
    """

    planes: int
    decode: Callable[[Array, Any], list[Array]]
    unit: float


def to_planes(x: Array, planes: int, span: int) -> Array:
    """Permutes each `span` of the last axis to the order of planes."""
    *lead, k = x.shape
    x = x.reshape(*lead, k // span, span // planes, planes)
    return jnp.swapaxes(x, -1, -2).reshape(*lead, k)


def from_planes(x: Array, planes: int, span: int) -> Array:
    """The inverse of `to_planes`."""
    return to_planes(x, span // planes, span)


def integers(problem: Problem) -> Decoder:
    """Returns a decoder of codes of integers to 8-bit integers, perhaps in other
    units."""
    format = problem.format
    if isinstance(format, Int8):
        return Decoder(1, lambda codes, zero: [codes], 1.0)
    if isinstance(format, Ternary):
        return Decoder(4, _ternary, 1 / 64)
    if isinstance(format, Binary):
        return Decoder(8, _binary, 1 / 64)
    if grid(problem).offset is None:
        return Decoder(2, _int4, 1 / 16)
    return Decoder(2, _affine, 1.0)


def _int4(codes: UInt8[Array, "j n"], zero: None) -> list[I8[Array, "j n"]]:
    # Flipping the top bit of each code subtracts 8. The signed result goes to the upper
    # half of a byte, which multiplies it by 16.
    word = _words(codes) ^ _u32(0x88888888)
    high = _u32(0xF0F0F0F0)
    return [_bytes((word << _u32(4)) & high), _bytes(word & high)]


def _affine(
    codes: UInt8[Array, "j n"], zero: Integer[Array, "g n"]
) -> list[I8[Array, "j n"]]:
    # Subtracts the zero-point from four codes in a word at once. A set top bit keeps
    # each byte from borrowing from the next, and is flipped back.
    word = _words(codes)
    less = spread(zero.astype(jnp.uint32) * _u32(0x01010101), word.shape[0])
    low, borrow = _u32(0x0F0F0F0F), _u32(0x80808080)

    def subtract(code):
        return _bytes(((code | borrow) - less) ^ borrow)

    return [subtract(word & low), subtract((word >> _u32(4)) & low)]


def _ternary(codes: UInt8[Array, "j n"], zero: None) -> list[I8[Array, "j n"]]:
    # The code minus one, modulo four, goes to the upper two bits of a signed byte,
    # which multiplies it by 64.
    word = _words(codes)
    even = ~word & _u32(0x55555555)
    odd = ~(word | (word << _u32(1))) & _u32(0xAAAAAAAA)
    word, top = even | odd, _u32(0xC0C0C0C0)
    return [_bytes((word << _u32(6 - 2 * i)) & top) for i in range(4)]


def _binary(codes: UInt8[Array, "j n"], zero: None) -> list[I8[Array, "j n"]]:
    # The inverted bit becomes the sign of 64: 0x40 is 64, and 0xC0 is -64.
    word, sign, one = ~_words(codes), _u32(0x80808080), _u32(0x40404040)
    return [_bytes(((word << _u32(7 - i)) & sign) | one) for i in range(8)]


def grid(problem: Problem) -> AbstractGrid:
    """Returns the format, after a check that it is a grid."""
    assert isinstance(problem.format, AbstractGrid)
    return problem.format


def lookup(format: AbstractGrid) -> Decoder:
    """Returns a decoder of codes of 4 bits to arbitrary points, in float32. The points
    are in two registers of eight rows; the top bit of a code chooses between them."""
    points = codebook(format)

    def decode(codes, zero):
        del zero
        word = _words(codes)
        low = _table(points[:8], word.shape[1], jnp.float32)
        high = _table(points[8:], word.shape[1], jnp.float32)

        def point(i):
            code = word >> _u32(4 * i)
            index = (code & _u32(7)).astype(jnp.int32)
            upper = (code & _u32(8)) != _u32(0)
            return jnp.where(upper, _gather(high, index), _gather(low, index))

        return [point(i) for i in range(8)]

    return Decoder(8, decode, 1.0)


def rounded_lookup(format: AbstractGrid) -> Decoder:
    """Returns a decoder of codes of 4 bits to arbitrary points, in bfloat16. A word of
    the table has the points of codes `i` and `i + 8`, so that each code is looked up
    once."""
    with jax.ensure_compile_time_eval():
        rounded = np.asarray(jnp.asarray(codebook(format)).astype(jnp.bfloat16))
    bits = rounded.view(np.uint16).astype(np.uint32)

    def decode(codes, zero):
        del zero
        word = _words(codes)
        table = _table(bits[:8] | (bits[8:] << 16), word.shape[1], jnp.uint32)
        lower, upper = _u32(0x0000FFFF), _u32(0xFFFF0000)

        def found(i):
            index = (word >> _u32(4 * i)) & _u32(7)
            return _gather(table, index.astype(jnp.int32))

        def half(i, other):
            # The shift that selects a half of the looked-up word by the code's top bit.
            bit = ~word if other else word
            bit = bit << _u32(1) if i == 0 else bit >> _u32(4 * i - 1)
            return bit & _u32(16)

        def pair(i):
            first = (found(i) >> half(i, False)) & lower
            second = (found(i + 4) << half(i + 4, True)) & upper
            return reinterpret(first | second, jnp.bfloat16)

        return [pair(i) for i in range(4)]

    return Decoder(4, decode, 1.0)


def codebook(format: AbstractGrid) -> Float[np.ndarray, "16"]:
    """Returns the point of each code."""
    with jax.ensure_compile_time_eval():
        return np.asarray(format.to_points(jnp.arange(16, dtype=jnp.uint8)))


def reinterpret(a: Shaped[Array, "m n"], dtype: Any) -> Shaped[Array, "_ n"]:
    """Reinterprets bits as numbers of another width, with more or fewer rows. The first
    row has the lowest bits."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.bitcast(a, dtype)


def spread(a: Array, rows: int) -> Array:
    """Repeats each row, to this number of rows in all."""
    groups, n = a.shape
    a = jnp.broadcast_to(a[:, None], (groups, rows // groups, n))
    return a.reshape(rows, n)


def _table(entries, n, dtype):
    # A table of eight rows, made of scalars: a kernel cannot close over arrays.
    row = lax.broadcasted_iota(jnp.int32, (8, n), 0)
    table = jnp.full((8, n), entries[0], dtype)
    for i, entry in enumerate(entries[1:], 1):
        table = jnp.where(row == i, jnp.asarray(entry, dtype), table)
    return table


_along_rows = lax.GatherDimensionNumbers(
    offset_dims=(),
    collapsed_slice_dims=(0,),
    start_index_map=(0,),
    operand_batching_dims=(1,),
    start_indices_batching_dims=(1,),
)


def _gather(table, index):
    # Like `jnp.take_along_axis`, but without its handling of negative indices.
    inside = lax.GatherScatterMode.PROMISE_IN_BOUNDS
    parts = [
        lax.gather(table, index[i : i + 8, :, None], _along_rows, (1, 1), mode=inside)
        for i in range(0, index.shape[0], 8)
    ]
    return jnp.concatenate(parts)


def _u32(value):
    return np.uint32(value)


def _words(codes: UInt8[Array, "j n"]) -> UInt32[Array, "_ n"]:
    return reinterpret(codes, jnp.uint32)


def _bytes(word: UInt32[Array, "_ n"]) -> I8[Array, "j n"]:
    return reinterpret(word, jnp.int8)
