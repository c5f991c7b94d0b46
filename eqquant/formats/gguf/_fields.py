"""Reads and writes bit fields."""

import functools as ft
import itertools as it
import operator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Integer, UInt8, UInt16

from .._bit_fields import BitField, Code, inverse


def read(
    bytes: UInt8[Array, "*b j"], codes: tuple[Code, ...]
) -> UInt8[Array, "*b k"] | UInt16[Array, "*b k"]:
    """Reads codes from the bytes that hold their bits. They have 16 bits if any code
    has more than 8."""
    ends = [field.at + field.number for code in codes for field in code]
    dtype = np.dtype(np.uint16 if max(ends, default=0) > 8 else np.uint8)
    parts = [
        ft.reduce(operator.or_, [_bits(bytes, each, dtype) for each in pieces])
        if pieces
        else jnp.zeros((*bytes.shape[:-1], number), dtype)
        for number, pieces in _parts(codes, bytes.shape[-1])
    ]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=-1)


def write(
    codes: UInt8[Array, "*b k"],
    fields: tuple[Code, ...],
    scales: UInt8[Array, "*b _"],
    scale_at: int,
    size: int,
) -> UInt8[Array, "*b j"]:
    """The inverse of `read`. Returns the `size` bytes of blocks, from codes and from
    the bytes that begin at `scale_at`."""
    last = scale_at + scales.shape[-1]
    fields += tuple((BitField(byte, 0, 8, 0),) for byte in range(scale_at, last))
    # Bytes are made of the bits of codes just as codes are made of the bits of bytes.
    return read(jnp.concatenate([codes, scales], axis=-1), inverse(fields, size))


class _Piece(NamedTuple):
    """The places of fields, one for each code: in `groups` groups of `apart` bytes, the
    first of which begins with `byte`. In each group, `before` bytes further, there are
    `width` integers of `size` bytes: first the `number` bits of each from `start` on,
    then the bits `step` higher, and so on. `at` is their lowest bit in a code."""

    byte: int
    before: int
    groups: int
    apart: int
    width: int
    size: int
    start: int
    planes: int
    step: int
    number: int
    at: int

    def bits(self):
        """The lowest bit of each field, among the bits of all bytes."""
        at = np.indices((self.groups, self.planes, self.width)).reshape(3, -1)
        byte = self.byte + self.before + at[0] * self.apart + at[2] * self.size
        return 8 * byte + self.start + at[1] * self.step


@ft.cache
def _parts(codes: tuple[Code, ...], size: int) -> list[tuple[int, list[_Piece]]]:
    """Splits codes into parts, one after another. Returns the number of codes of each
    part, and the places of their bits."""
    found = _pieces(codes, size)
    if found is not None:
        return [(len(codes), found)]
    runs = [tuple(run) for _, run in it.groupby(codes, _kind)]
    if len(runs) == 1:
        # (The longest part that is in one piece.)
        sizes = range(len(codes) - 1, 0, -1)
        first = next(i for i in sizes if _pieces(codes[:i], size) is not None)
        runs = [codes[:first], codes[first:]]
    return [part for run in runs for part in _parts(run, size)]


def _straight(code: Code) -> list[tuple[int, int, int]]:
    """Returns the first bit, the number of bits and their place in the code, of fields
    that continue from one byte to the next."""
    found = []
    for byte, start, number, at in code:
        if found and sum(found[-1][:2]) == 8 * byte + start and start == 0:
            found[-1] = (found[-1][0], found[-1][1] + number, found[-1][2])
        else:
            found.append((8 * byte + start, number, at))
    return found


def _each(code: Code) -> list[tuple[int, int, int]]:
    return [(8 * byte + start, number, at) for byte, start, number, at in code]


def _kind(code: Code):
    return [(number, at) for _, number, at in _straight(code)]


def _pieces(codes: tuple[Code, ...], size: int) -> list[_Piece] | None:
    if any(_kind(code) != _kind(codes[0]) for code in codes):
        return None
    # (The fields of a single code are pieces in any case.)
    for fields in (_straight, _each)[: 1 + (len(codes) == 1)]:
        found = [_piece(some, size) for some in zip(*map(fields, codes))]
        if None not in found:
            return [piece for piece in found if piece is not None]
    return None


def _piece(fields: tuple[tuple[int, int, int], ...], size: int) -> _Piece | None:
    bits = np.array([bit for bit, _, _ in fields])
    (_, number, at), n = fields[0], len(fields)
    first, start = divmod(int(bits[0]), 8)
    if np.all(bits % 8 + number <= 8):
        width, bytes = _leading(bits == bits[0] + 8 * np.arange(n)), 1
        planes = _leading(bits[::width] // 8 == first)
        step = int(bits[width] - bits[0]) if planes > 1 else 0
    else:
        width, step = 1, int(bits[1] - bits[0]) if n > 1 else 0
        inside = bits - 8 * first + number <= 32
        planes = _leading(inside & (bits == bits[0] + step * np.arange(n)))
        bytes = 2 if start + (planes - 1) * step + number <= 16 else 4
    each = width * planes
    apart = int(bits[each] - bits[0]) // 8 if each < n else width * bytes
    groups, wide = n // each, width * bytes
    if n % each or apart < wide:
        return None
    # All groups are whole, including the last.
    last = first + groups * apart - size
    for before in (first % apart if apart > wide else 0, max(0, last)):
        if last <= before <= min(first, apart - wide):
            found = _Piece(
                *(first - before, before, groups, apart, width, bytes),
                *(start, planes, step, number, at),
            )
            return found if np.array_equal(found.bits(), bits) else None
    return None


def _leading(true) -> int:
    """Returns the number of true values before the first false one."""
    return int(np.argmin(np.append(true, False)))


def _bits(bytes, some: _Piece, dtype) -> Integer[Array, "*b _"]:
    lead = bytes.shape[:-1]
    x = bytes[..., some.byte : some.byte + some.groups * some.apart]
    x = x.reshape(*lead, some.groups, 1, some.apart)
    x = x[..., some.before : some.before + some.width * some.size]
    if some.size > 1:
        x = x.reshape(*x.shape[:-1], some.width, some.size)
        x = lax.bitcast_convert_type(x, jnp.uint16 if some.size == 2 else jnp.uint32)
    starts = np.arange(some.planes) * some.step + some.start
    if np.any(starts > 0):
        x = x >> starts.astype(x.dtype).reshape((1,) * (len(lead) + 1) + (-1, 1))
    if some.number < 8 * some.size:
        x = x & np.asarray(2**some.number - 1, x.dtype)
    x = x.astype(dtype)
    if some.at > 0:
        x = x << np.asarray(some.at, dtype)
    return x.reshape(*lead, some.groups * some.planes * some.width)
