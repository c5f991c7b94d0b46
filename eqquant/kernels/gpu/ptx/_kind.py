import functools as ft
from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from ....formats import AbstractGrid
from .._words import points_of


class Kind(NamedTuple):
    """How the sources read the codes of a format.

    - `codes`: the class of `codes.cuh`.
    - `bits`: of a code.
    - `pairs`: whether two codes that go into one register are of the two halves of a
      word, or neighbours.
    - `table`: the bits of the 16 numbers that codes stand for, in bfloat16. Empty if
      they are integers.
    - `exact`: whether bfloat16 holds the points of the format.
    """

    codes: str
    bits: int
    pairs: Literal["halves", "neighbours"]
    table: tuple[int, ...] = ()
    exact: bool = True


@ft.cache
def kind_of(format: AbstractGrid) -> Kind | None:
    """How to read the codes of a format, or `None`."""
    points = points_of(format)
    if points is None or format.offset is not None or format.ordered:
        return None
    if points.table is not None:
        table = np.asarray(points.table, np.float32)
        rounded = table.astype(jnp.bfloat16)
        exact = np.array_equal(rounded.astype(np.float32), table)
        bits = tuple(rounded.view(np.uint16).tolist())
        return Kind("Table<Points>", 4, "neighbours", bits, exact)
    if points.float8 is not None:
        return None
    if points.whole == "signed":
        return Kind("Bytes", 8, "halves")
    if points.whole is None and points.zero is not None and points.per_byte > 1:
        bits = 8 // points.per_byte
        return Kind(f"Integers<{bits}, {points.zero}>", bits, "halves")
    return None


def scales_of(format: AbstractGrid) -> str:
    """The class of `scales.cuh` for the scales of a format."""
    if format.block_size is None:
        return "None"
    names = {"float32": "Float32", "bfloat16": "BFloat16", "float16": "Float16"}
    return names[np.dtype(format.scale_dtype).name]
