"""Reads and writes bit fields."""

import functools as ft
import itertools as it
import operator
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Integer, UInt8, UInt16

from .._bit_fields import BitField, Code, inverse


# `zeros(first, last)` returns zeros of shape `*b last-first _` for the codes from
# `first` to `last`, one for each time that a code is read. They are combined with the
# bytes. A compiler that knows neither that they are zeros nor that two calls return the
# same values cannot share any computation between the reads.
Zeros: TypeAlias = Callable[[int, int], UInt8[Array, "..."]]


def read(
    bytes: UInt8[Array, "*b j"],
    codes: tuple[Code, ...],
    zeros: Zeros | None = None,
) -> UInt8[Array, "..."] | UInt16[Array, "..."]:
    """Reads codes from the bytes that hold their bits. Returns them in shape `*b k`, as
    integers of 16 bits if any code has more than 8. With `zeros`, each code is repeated
    as often as it has zeros, and the shape is `*b k _`."""
    ends = [field.at + field.number for code in codes for field in code]
    dtype = np.dtype(np.uint16 if max(ends, default=0) > 8 else np.uint8)
    found, first = [], 0
    for number, pieces in _parts(codes, bytes.shape[-1]):
        some = None if zeros is None else ft.partial(zeros, first, first + number)
        parts = [_bits(bytes, each, dtype, some) for each in pieces]
        if not pieces:
            shape = (*bytes.shape[:-1], number) if some is None else some().shape
            parts = [jnp.zeros(shape, dtype)]
        found.append(ft.reduce(operator.or_, parts))
        first += number
    axis = bytes.ndim - 1
    return found[0] if len(found) == 1 else jnp.concatenate(found, axis=axis)


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
    """The places of fields, one field for each code. There are `groups` groups of
    `apart` bytes, and the first group begins at `byte`. Each group has `width` integers
    of `size` bytes, `before` bytes after its beginning. The first fields are the
    `number` bits of each integer from `start` on, the next fields are the bits `step`
    higher, and so on, in `planes` planes. `at` is the lowest bit of a field in its
    code."""

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
        # (Splits off the longest part that is in one piece.)
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


def _bits(bytes, some: _Piece, dtype, zeros) -> Integer[Array, "..."]:
    lead, first = bytes.shape[:-1], some.before
    if some.groups == 1:
        first += some.byte
    else:
        bytes = bytes[..., some.byte : some.byte + some.groups * some.apart]
        bytes = bytes.reshape(*lead, some.groups, some.apart)
    last = first + some.width * some.size
    kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[some.size]

    def nth(i):
        byte = bytes[..., first + i : last : some.size]
        byte = byte.reshape(*lead, some.groups, 1, some.width)
        if zeros is not None:
            # (The last axis of the zeros is for the repeated reads of each code.)
            axes = (some.groups, some.planes, some.width)
            byte = byte[..., None] | zeros().reshape(*lead, *axes, -1)
        return byte.astype(kind) << np.asarray(8 * i, kind) if i else byte.astype(kind)

    # (Not a cast of several bytes to one number, which XLA fuses with less.)
    x = ft.reduce(operator.or_, map(nth, range(some.size)))
    starts = np.arange(some.planes) * some.step + some.start
    if np.any(starts > 0):
        shape = (some.planes,) + (1,) * (1 if zeros is None else 2)
        x = x >> starts.astype(kind).reshape((1,) * (len(lead) + 1) + shape)
    if some.number < 8 * some.size:
        x = x & np.asarray(2**some.number - 1, x.dtype)
    x = x.astype(dtype)
    if some.at > 0:
        x = x << np.asarray(some.at, dtype)
    number = some.groups * some.planes * some.width
    return x.reshape(*lead, number) if zeros is None else x.reshape(*lead, number, -1)
