import functools as ft
import itertools as it
import operator
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int32, Integer, UInt8

from ...formats import (
    AbstractGGUFBlocks,
    AbstractGrid,
    Code,
    Stored,
    stream_fields,
)
from .._problem import Problem
from ._codes import grid, points, refuse_layout


# A weight as units of some bytes, side by side, each packed in the same way: the blocks
# of a GGUF type, or a part of a stream of bits. The bytes at one place of all units are
# then an array `u n`, and so are the values computed from them.


class Units(NamedTuple):
    """Some units of a weight.

    - `number`: the number of units.
    - `bytes`: `bytes(i, number, step)` returns `number` bytes of each unit, from byte
        `i` on, `step` apart.
    - `codes`: the places of the codes of each unit, in order.
    - `parts`: a number for each code of a unit. Codes with equal numbers share a scale.
    - `first`: the position of their first code in a row of the weight.
    - `scales`: `scales(codes)` returns the scales and, if there are any, the offsets of
        some codes of one part of each unit; or of several parts that are stored alike,
        one after another.
    - `base`: the format of the codes.
    - `computed`: the parts whose scales are not stored but computed, in groups that are
        stored alike.
    """

    number: int
    bytes: Callable[[int, int, int], Integer[Array, "u _ n"]]
    codes: tuple[Code, ...]
    parts: tuple[int, ...]
    first: int
    scales: Callable[
        [Sequence[int]], tuple[Float[Array, "u _ n"], Float[Array, "u _ n"] | None]
    ]
    base: AbstractGrid
    computed: Sequence[Sequence[int]] = ()

    def inputs(self, x: Float[Array, "m k"]) -> Float[Array, "m u s"]:
        """Returns the inputs that multiply the codes, and zeros for codes beyond the
        last."""
        size = self.number * len(self.codes)
        x = x[:, self.first : self.first + size]
        x = jnp.pad(x, ((0, 0), (0, size - x.shape[1])))
        return x.reshape(x.shape[0], self.number, len(self.codes))

    def points(self, codes: Sequence[int]) -> tuple[Float[Array, "u _ n"], float]:
        """Returns the points of some codes, whose bytes and bits are at even distances,
        up to a factor, and the factor."""
        return points(self.base, _read(self.bytes, [self.codes[i] for i in codes]))


def _read(bytes, codes: Sequence[Code]) -> Integer[Array, "u _ n"]:
    """Reads some codes of each unit, whose bytes and bits are at even distances."""
    parts = []
    for i, field in enumerate(codes[0]):
        step = codes[1][i].byte - field.byte if len(codes) > 1 else 0
        found = bytes(field.byte, len(codes), step)
        parts.append(_moved(found, field.start, field.number, field.at))
    return ft.reduce(operator.or_, parts)


def alike(codes: Sequence[Code]) -> list[list[int]]:
    """Groups codes by the same bits of bytes at even distances, as read by
    `Units.points`."""

    def step(i, j):
        return [b.byte - a.byte for a, b in zip(codes[i], codes[j])]

    def kind(i):
        return [field[1:] for field in codes[i]]

    found = []
    for _, same in it.groupby(sorted(range(len(codes)), key=kind), kind):
        run = []
        for i in same:
            uneven = len(run) > 1 and step(run[-1], i) != step(*run[:2])
            if uneven or len(run) > 1 and i - run[-1] != run[1] - run[0]:
                found.append(run)
                run = []
            run.append(i)
        found.append(run)
    return found


def _bytes_of_units(
    stored: Integer[Array, "j n"], first: int, number: int, each: int
) -> Callable[[int, int, int], Integer[Array, "u _ n"]]:
    # Returns a reader of `number` units of `each` bytes, which begin with byte `first`.
    @ft.cache
    def bytes(i, count, step):
        if count == 1:
            # (In one step, so that XLA reads them at their use.)
            last = first + i + (number - 1) * each + 1
            return lax.slice_in_dim(stored, first + i, last, each)[:, None]
        all = stored[first : first + number * each].reshape(number, each, -1)
        last = i + (count - 1) * step + 1
        return lax.slice_in_dim(all, i, last, max(1, step), axis=1)

    return bytes


def _moved(
    bytes: Integer[Array, "u _ n"], start: int, number: int, at: int
) -> Integer[Array, "u _ n"]:
    """Moves some bits of bytes to their place in a code."""
    if number == 8:
        return bytes
    found = bytes.astype(jnp.int32)
    if start > at:
        found = found >> np.int32(start - at)
    elif start < at:
        found = found << np.int32(at - start)
    if start + number < 8 or at > 0:
        found = found & np.int32((2**number - 1) << at)
    return found


class Span(NamedTuple):
    """Some units of a weight: the first of their blocks, or of their codes if blocks
    are cut; the number of units; and the number of blocks, or codes, in each."""

    first: int
    number: int
    size: int


def spans(problem: Problem, codes: int, number: int | None = None) -> list[Span]:
    """Divides a weight into units of about `codes` codes, or of one block if that is 0.
    The rest is a smaller unit.

    With `number`, a span has at most this number of units.
    """
    if isinstance(problem.format, AbstractGGUFBlocks):
        block = problem.format.block_size
        total = -(-problem.k // block)
        size, least = max(1, codes // block), 1
    else:
        total = problem.k
        size, least = _codes_of_unit(grid(problem), codes)
    # Prefers a slightly smaller size that leaves no rest.
    even = [i for i in range(size, size // 2, -least) if total % i == 0]
    size = even[0] if even else size
    whole, rest = divmod(total, size)
    number = number or max(1, whole)
    found = [
        Span(i * size, min(number, whole - i), size) for i in range(0, whole, number)
    ]
    return [*found, Span(whole * size, 1, rest)] if rest > 0 else found


def units(stored: Stored, problem: Problem, span: Span) -> Units:
    """Returns the units of a span."""
    if isinstance(problem.format, AbstractGGUFBlocks):
        return _of_gguf(stored["blocks"], problem.format, *span)
    return _of_grid(stored, problem, *span)


def _of_gguf(
    bytes: UInt8[Array, "j n"],
    format: AbstractGGUFBlocks,
    first: int,
    number: int,
    size: int,
) -> Units:
    # `size` blocks in each unit.
    t = format.type_size
    rows = _bytes_of_units(bytes, first * t, number, size * t)
    fields, small = format.fields, format.base.block_size
    assert small is not None
    each = format.block_size // small

    def half(i):
        low, high = (rows(i + j, 1, 1).astype(jnp.uint16) for j in (0, 1))
        bits = low | high << np.uint16(8)
        return lax.bitcast_convert_type(bits, jnp.float16).astype(jnp.float32)

    def integers(of_parts, which: Sequence[int]) -> Int32[Array, "u _ n"]:
        return _read(rows, [of_parts[i] for i in which]).astype(jnp.int32)

    def scales(codes):
        which = list(dict.fromkeys(parts[i] for i in codes))
        at = which[0] // each * t  # All codes are in one block.
        scale = half(at + format.scale_at)
        low = half(at + format.scale_at + 2) if format.halves == 2 else None
        if fields.steps:
            found = integers(steps, which)
            if fields.signed:
                found = (found << np.int32(24)) >> np.int32(24)
            scale = scale * (found - np.int32(fields.zero)).astype(jnp.float32)
        if fields.lows:
            assert low is not None
            low = -(low * integers(lows, which).astype(jnp.float32))
        return scale, low

    def of_all(codes):
        return tuple(
            tuple(field._replace(byte=field.byte + i * t) for field in code)
            for i in range(size)
            for code in codes
        )

    codes, steps, lows = map(of_all, (fields.codes, fields.steps, fields.lows))
    parts = tuple(i // small for i in range(len(codes)))
    groups = alike(
        [a + b for a, b in it.zip_longest(fields.steps, fields.lows, fillvalue=())]
    )
    computed = [
        [part + i * each for part in group]
        for i in range(size)
        for group in groups or [[0]]
    ]
    at = first * format.block_size
    return Units(number, rows, codes, parts, at, scales, format.base, computed)


def _codes_of_unit(format: AbstractGrid, most: int) -> tuple[int, int]:
    """Returns the largest number of codes in a unit, and the number of which it is a
    multiple: whole blocks, or an even part of a block."""
    least = 16  # Any block size is a multiple of this, which is whole bytes.
    block = format.block_size
    codes = max(least, most) if most > 0 else 256
    if block is None:
        return codes // least * least, least
    if block <= codes:
        return (codes // block if most > 0 else 1) * block, block
    size = max(i for i in range(least, codes + 1, least) if block % i == 0)
    return size, size


def _of_grid(
    stored: dict[str, Array], problem: Problem, first: int, number: int, size: int
) -> Units:
    format, bits = grid(problem), (grid(problem).levels - 1).bit_length()
    rows = _bytes_of_units(
        stored["codes"], first * bits // 8, number, -(-size * bits // 8)
    )
    scale, offset = format.scales(stored, problem.tail), format.offsets(stored)
    blocks = scale.shape[0]
    block = format.block_size or problem.k

    def scales(codes):
        low = None if offset is None else of_codes(offset, codes)
        return of_codes(scale, codes), low

    def of_codes(a, codes):
        if blocks == 1:
            return a[None]
        if format.ordered:
            positions = first + np.arange(number)[:, None] * size + np.array(codes)
            which = stored["block"].reshape(-1)[positions.reshape(-1)]
            found = jnp.take(a, which, axis=0, mode="clip")
            return found.reshape(number, len(codes), a.shape[1])
        at, each = first // block, size // block
        if each > 0:
            at = at + parts[codes[0]]
            last = at + (number - 1) * max(1, each) + 1
            return lax.slice_in_dim(a, at, last, each, axis=0)[:, None]
        each, skipped = block // size, first % block // size
        a = a[at : at + -(-(skipped + number) // each), None]
        a = jnp.broadcast_to(a, (a.shape[0], each, a.shape[2]))
        return a.reshape(-1, 1, a.shape[2])[skipped : skipped + number]

    parts = tuple(i if format.ordered else i // block for i in range(size))
    return Units(number, rows, stream_fields(bits, size), parts, first, scales, format)


def base_of(problem: Problem) -> AbstractGrid:
    """Returns the format of the codes."""
    format = problem.format
    return format.base if isinstance(format, AbstractGGUFBlocks) else grid(problem)


def refuse_units(problem: Problem) -> str | None:
    """Returns why a weight is not read as units, or `None`."""
    format = problem.format
    if isinstance(format, AbstractGrid) and format.radix is not None:
        # (Others leave bits of a byte unused.)
        if format.radix not in (2, 4, 16, 256):
            return f"decodes codes of whole bits, got {format}"
        if (format.block_size or 16) % 16:
            return f"needs blocks of a multiple of 16 codes, got {format}"
    return refuse_layout(problem)
