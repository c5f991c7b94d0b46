from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int8 as I8, Integer, Shaped, UInt8, UInt32

from ...formats import AbstractFormat, AbstractGrid, Binary, Int4, Int8, Ternary


# Bytes are decoded 32 bits at a time, four rows of bytes in one word: a TPU has no
# arithmetic of narrower integers, but it reinterprets registers for free. What comes
# out are planes: the first code of each byte, the second and so on. So a product wants
# its contracted axis in that order, which is for the inputs to be brought into.


class Decoder(NamedTuple):
    """How a tile of bytes is decoded.

    - `planes`: how many planes there are.
    - `decode`: bytes, and zero-points or `None`, to planes.
    - `unit`: what one stands for in them.
    """

    planes: int
    decode: Callable[[Array, Any], list[Array]]
    unit: float


def to_planes(x: Array, planes: int, span: int) -> Array:
    """Brings the last axis into the order of planes, each `span` of it on their own."""
    *lead, k = x.shape
    x = x.reshape(*lead, k // span, span // planes, planes)
    return jnp.swapaxes(x, -1, -2).reshape(*lead, k)


def from_planes(x: Array, planes: int, span: int) -> Array:
    """The inverse of `to_planes`."""
    return to_planes(x, span // planes, span)


def integers(format: AbstractFormat) -> Decoder:
    """Decodes codes that are integers, as such, in 8 bits."""
    if isinstance(format, Int8):
        return Decoder(1, lambda codes, zero: [codes], 1.0)
    if isinstance(format, Ternary):
        return Decoder(4, _ternary, 1 / 64)
    if isinstance(format, Binary):
        return Decoder(8, _binary, 1 / 64)
    assert isinstance(format, Int4)
    return Decoder(2, _int4, 1 / 16) if format.symmetric else Decoder(2, _affine, 1.0)


def _int4(codes: UInt8[Array, "j n"], zero: None) -> list[I8[Array, "j n"]]:
    # Less eight, in the upper half of a byte.
    word = _words(codes) ^ _u32(0x88888888)
    high = _u32(0xF0F0F0F0)
    return [_bytes((word << _u32(4)) & high), _bytes(word & high)]


def _affine(
    codes: UInt8[Array, "j n"], zero: Integer[Array, "g n"]
) -> list[I8[Array, "j n"]]:
    word = _words(codes)
    less = spread(zero.astype(jnp.uint32) * _u32(0x01010101), word.shape[0])
    low, borrow = _u32(0x0F0F0F0F), _u32(0x80808080)

    def subtract(code):
        return _bytes(((code | borrow) - less) ^ borrow)

    return [subtract(word & low), subtract((word >> _u32(4)) & low)]


def _ternary(codes: UInt8[Array, "j n"], zero: None) -> list[I8[Array, "j n"]]:
    # Two bits less one, modulo four, are the upper two of a signed byte.
    word = _words(codes)
    even = ~word & _u32(0x55555555)
    odd = ~(word | (word << _u32(1))) & _u32(0xAAAAAAAA)
    word, top = even | odd, _u32(0xC0C0C0C0)
    return [_bytes((word << _u32(6 - 2 * i)) & top) for i in range(4)]


def _binary(codes: UInt8[Array, "j n"], zero: None) -> list[I8[Array, "j n"]]:
    # 0x40 is 64, and 0xC0 is -64.
    word, sign, one = ~_words(codes), _u32(0x80808080), _u32(0x40404040)
    return [_bytes(((word << _u32(7 - i)) & sign) | one) for i in range(8)]


def lookup(format: AbstractFormat) -> Decoder:
    """Decodes codes of 4 bits to any numbers, in float32."""
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


def rounded_lookup(format: AbstractFormat) -> Decoder:
    """Decodes codes of 4 bits to any numbers, in bfloat16. A word of the table has two
    of them, so that each code is looked up once."""
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
            # By how much to shift: by 16 if the last bit of the code says so.
            bit = ~word if other else word
            bit = bit << _u32(1) if i == 0 else bit >> _u32(4 * i - 1)
            return bit & _u32(16)

        def pair(i):
            first = (found(i) >> half(i, False)) & lower
            second = (found(i + 4) << half(i + 4, True)) & upper
            return reinterpret(first | second, jnp.bfloat16)

        return [pair(i) for i in range(4)]

    return Decoder(4, decode, 1.0)


def codebook(format: AbstractFormat) -> Float[np.ndarray, "16"]:
    """The point of each code."""
    assert isinstance(format, AbstractGrid)
    with jax.ensure_compile_time_eval():
        return np.asarray(format.to_points(jnp.arange(16, dtype=jnp.uint8)))


def reinterpret(a: Shaped[Array, "m n"], dtype: Any) -> Shaped[Array, "_ n"]:
    """The same bits as numbers of another width, of which there are more or fewer rows:
    the first of them is the lowest bits."""
    from jax.experimental.pallas import tpu as pltpu

    return pltpu.bitcast(a, dtype)


def spread(a: Array, rows: int) -> Array:
    """Repeats each row, so that there are so many."""
    groups, n = a.shape
    a = jnp.broadcast_to(a[:, None], (groups, rows // groups, n))
    return a.reshape(rows, n)


def _table(entries, n, dtype):
    # An array of eight rows: a kernel may close over scalars only.
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
    # As `jnp.take_along_axis`, which would allow for negative indices.
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
