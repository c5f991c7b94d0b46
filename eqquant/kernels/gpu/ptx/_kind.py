import functools as ft
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ....formats import AbstractGrid, ByteScales
from ...cpu._codes import integer_step
from .._words import points_of


class Kind(NamedTuple):
    """How the sources read a weight, in steps along the contracted axis.

    - `weight`: the class that reads it, in C++.
    - `source`: what this class needs, in C++.
    - `operands`: the names of the stored arrays that it reads.
    - `step_bytes`, `step_columns`: the bytes of a row of the first of these arrays that
      are read in a step, and the numbers that they stand for.
    - `load_bytes`: the bytes of a row are a multiple of this number.
    - `order`: the columns in the order in which they are multiplied, for a period.
    - `scale_columns`: the number of columns that share a scale in `stored["scale"]`.
      `None` for all columns of a row, or if there is no such array.
    - `scales_rows`: whether there is one scale for each row, which is applied after the
      sum.
    - `adds_inputs`: whether minima of blocks multiply sums of the inputs.
    - `most_rows`: the number of rows of `x` for which there are enough registers.
    - `error`: the largest relative error of a decoded number.
    """

    weight: str
    source: str
    operands: tuple[str, ...]
    step_bytes: int
    step_columns: int
    load_bytes: int
    order: tuple[int, ...]
    adds_inputs: bool = False
    most_rows: int = 64
    scale_columns: int | None = None
    scales_rows: bool = False
    error: float = 0.0


class _Codes(NamedTuple):
    # - `decoder`: the class in `codes.cuh` that decodes the codes. (The number of bytes
    #   that a lane loads is inserted.)
    # - `bits`: the number of bits in a code.
    # - `halves`: whether the two codes in a register come from the two halves of a
    #   word, or are neighbours.
    # - `table`: the 16 numbers that codes stand for. Empty for codes without a table.
    decoder: str
    bits: int
    halves: bool = True
    table: tuple[float, ...] = ()


@ft.cache
def kind_of_grid(
    format: AbstractGrid, byte_scales: ByteScales | None = None
) -> Kind | None:
    """Returns how to read a weight of codes and scales, or `None` if the sources
    cannot. `byte_scales` describes scales of one byte, which belong to the format in
    the place of its own."""
    codes = _codes_of(format)
    if codes is None:
        return None
    found = _lane(format.block_size, codes.bits)
    if found is None or (found[1] > 0 and format.offset == "minimum"):
        return None
    nbytes, own = found
    scales = _scales_of(format, byte_scales)
    offset = _offsets[format.offset]
    # The codes that are decoded together: of a word, or of a lane.
    some = np.arange(32 // codes.bits if format.radix else nbytes * 8 // codes.bits)
    order = some.reshape(2, -1).T.reshape(-1) if codes.halves else some
    adds_inputs = format.offset == "minimum"
    return Kind(
        weight=f"Grid<{codes.decoder.format(nbytes)}, {scales}, Offset::{offset}, "
        f"{nbytes}, {own}>",
        source=source_of_table(codes.table) if codes.table else "",
        operands=("codes", *_names(format, scales)),
        step_bytes=4 * nbytes,
        step_columns=32 * nbytes // codes.bits,
        load_bytes=nbytes,
        order=tuple(order.tolist()),
        scale_columns=format.block_size,
        scales_rows=scales == "None",
        adds_inputs=adds_inputs,
        most_rows=32 if adds_inputs else 64,
        error=_error(codes, own > 0, byte_scales),
    )


def _codes_of(format: AbstractGrid) -> _Codes | None:
    if format.ordered:
        return None
    if format.radix == 2 and integer_step(format) == (2, -1):
        return _Codes("Signs", 1) if format.offset is None else None
    if format.radix is None:
        step, bits = integer_step(format, most=255), int(format.bits)
        if step is None or step[0] != 1 or not 0 <= -step[1] < 128 or bits > 7:
            return None
        return _Codes(f"Stream<{bits}, {-step[1]}, {{}}>", bits)
    if (points := points_of(format)) is None:
        return None
    if points.float8 is not None:
        return _Codes("Floats", 8) if points.float8 == _e4m3 else None
    if points.table is not None:
        return _Codes("Table<Points>", 4, halves=False, table=points.table)
    if points.whole is not None:
        signed = points.whole == "signed"
        if points.excess != (0 if signed or format.offset is None else -128):
            return None
        return _Codes(f"Bytes<{str(signed).lower()}>", 8)
    if points.per_byte == 1:
        return None
    bits = 8 // points.per_byte
    return _Codes(f"Integers<{bits}, {points.zero or 0}>", bits)


def _lane(block: int | None, bits: int) -> tuple[int, int] | None:
    """Returns how many bytes of a row a lane loads at once, and how many blocks these
    are, or zero if the bytes of four lanes belong to the same block. `None` if no
    number of bytes allows either."""
    # (A lane also loads 16 bytes of inputs at once, which are eight inputs.)
    if 8 % bits == 0:
        sizes = [nbytes for nbytes in (16, 8, 4) if 8 * nbytes // bits >= 8]
    else:
        numbers = [number for number in (32, 16, 8) if number * bits % 16 == 0]
        sizes = [number * bits // 8 for number in numbers]
    for nbytes in sizes:
        if block is None or block % (4 * 8 * nbytes // bits) == 0:
            return nbytes, 0
    for nbytes in sizes:
        codes = 8 * nbytes // bits
        # (The two codes in a register belong to the same block.)
        together = 32 // bits if 8 % bits == 0 else codes
        if block is not None and codes % block == 0 and block % together == 0:
            return nbytes, codes // block
    return None


def _scales_of(format, byte_scales):
    if byte_scales is not None:
        return "E8M0" if byte_scales.factor is None else "E4M3"
    # Scales of whole rows are applied afterwards, if there are no offsets.
    if format.block_size is None and format.offset is None:
        return "None"
    names = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
    return names[np.dtype(format.scale_dtype).name]


def _names(format, scales):
    if scales == "None":
        return ()
    return ("scale",) if format.offset is None else ("scale", format.offset)


def source_of_table(table: Sequence[float]) -> str:
    """Returns the source of the class `Points`, with 16 numbers."""
    bits = np.asarray(table, np.float32).astype(jnp.bfloat16).view(np.uint16)
    bits = ", ".join(map(hex, bits.tolist()))
    return (
        f"CONSTANT unsigned short points[16] = {{{bits}}};\n"
        "struct Points { ON_LANE static Word bits(int i) { return points[i]; } };\n"
    )


def _error(codes, scales_numbers, byte_scales):
    table = np.asarray(codes.table, np.float32)
    error = rounding_error(table)
    if not scales_numbers:
        return error
    if byte_scales is not None and codes.table:
        scales = np.arange(0x7F, dtype=np.uint8).view(_e4m3).astype(np.float32)
        if rounding_error(np.outer(table, scales)) == 0:
            return error
    # The scale is rounded, and then the product.
    return error + 2 * 2.0**-8


def rounding_error(numbers: Float[np.ndarray, "..."]) -> float:
    """Returns the largest relative error of numbers that are rounded to bfloat16."""
    some = numbers[numbers != 0]
    error = np.abs(some.astype(jnp.bfloat16).astype(np.float32) / some - 1)
    return float(np.max(error, initial=0))


_offsets = {None: "kNone", "zero_point": "kZeroPoint", "minimum": "kMinimum"}
_e4m3 = np.dtype(jnp.float8_e4m3fn)
