import functools as ft
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from ....formats import AbstractGrid
from ...cpu._codes import integer_step
from .._words import points_of


class Kind(NamedTuple):
    """How the sources read the codes of a format.

    - `codes`: the name of the class in `codes.cuh` that decodes them.
    - `bits`: the number of bits in a code.
    - `pairs`: whether the two codes in a register come from the two halves of a word,
      or are neighbours.
    - `offset`: the value of `Offset` in `scales.cuh` for the offset of blocks.
    - `table`: the 16 numbers that codes stand for, as bits of bfloat16. Empty for codes
      without a table.
    - `exact`: whether bfloat16 holds the points of the format exactly.
    """

    codes: str
    bits: int
    pairs: Literal["halves", "neighbours"]
    offset: str = "kNone"
    table: tuple[int, ...] = ()
    exact: bool = True

    @property
    def adds_inputs(self) -> bool:
        """Whether minima of blocks multiply sums of the inputs."""
        return self.offset == "kMinimum"

    @property
    def most_rows(self) -> int:
        """The number of rows of `x` for which there are enough registers."""
        return 32 if self.adds_inputs else 64


@ft.cache
def kind_of(format: AbstractGrid) -> Kind | None:
    """Returns how to read the codes of a format, or `None` if the sources cannot."""
    if format.ordered:
        return None
    if format.radix == 2 and integer_step(format) == (2, -1):
        return Kind("Signs", 1, "halves") if format.offset is None else None
    if (points := points_of(format)) is None:
        return None
    offset = _offsets[format.offset]
    if points.float8 is not None:
        return Kind("Floats", 8, "halves") if points.float8 == _e4m3 else None
    if points.table is not None:
        table = np.asarray(points.table, np.float32)
        rounded = table.astype(jnp.bfloat16)
        exact = np.array_equal(rounded.astype(np.float32), table)
        bits = tuple(rounded.view(np.uint16).tolist())
        return Kind("Table<Points>", 4, "neighbours", table=bits, exact=exact)
    if points.whole is not None:
        signed = points.whole == "signed"
        if points.excess != (0 if signed or format.offset is None else -128):
            return None
        return Kind(f"Bytes<{str(signed).lower()}>", 8, "halves", offset)
    if points.per_byte == 1:
        return None
    bits = 8 // points.per_byte
    return Kind(f"Integers<{bits}, {points.zero or 0}>", bits, "halves", offset)


_offsets = {None: "kNone", "zero_point": "kZeroPoint", "minimum": "kMinimum"}
_e4m3 = np.dtype(jnp.float8_e4m3fn)


def scales_of(format: AbstractGrid) -> str:
    """Returns the name of the class in `scales.cuh` for the scales of a format."""
    if not scales_numbers(format):
        return "None"
    names = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
    return names[np.dtype(format.scale_dtype).name]


def scales_numbers(format: AbstractGrid) -> bool:
    """Whether the scales are applied to the sums of each step. Scales of whole rows are
    applied afterwards, if there are no offsets."""
    return format.block_size is not None or format.offset is not None
