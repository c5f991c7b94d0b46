from typing import ClassVar

from .._bit_fields import joined, plane_fields
from .._grid import AbstractGrid
from ._base import BlockFields
from ._iq4 import iq4, points
from ._k import AbstractK
from ._search import PointSearch


class IQ4_XS(AbstractK):
    """GGUF's `IQ4_XS`: the points of [`eqquant.formats.IQ4_NL`][], with a scale for
    each 32 numbers. The scales are signed 6-bit integers, times a float16 scale for
    each 256 numbers. 4.25 bits.

    ??? cite "Reference"

        `quantize_iq4_xs` and `dequantize_row_iq4_xs` of ggml.
    """

    block_size: ClassVar[int] = 256
    base: ClassVar[AbstractGrid] = iq4
    search: ClassVar[PointSearch] = points
    type_size: ClassVar[int] = 136
    scale_at: ClassVar[int] = 0
    halves: ClassVar[int] = 1
    fields: ClassVar[BlockFields] = BlockFields(
        plane_fields(8, 128, 4, 16),
        joined(plane_fields(4, 4, 4, 1), plane_fields(2, 2, 2, 1, at=4)),
        zero=32,
    )
