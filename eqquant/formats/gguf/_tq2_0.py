from typing import ClassVar

from .._bit_fields import Code, plane_fields
from ._tq import AbstractTQ


class TQ2_0(AbstractTQ):
    """GGUF's `TQ2_0`: -1, 0 or 1, with a float16 scale for each 256 numbers: the
    largest absolute value. Four codes to a byte: 2.0625 bits.

    This is for weights that are ternary already, with one absolute value in each block.
    Other weights lose most of their information: see [`eqquant.Ternary`][].

    ??? cite "Reference"

        `quantize_row_tq2_0_ref` and `dequantize_row_tq2_0` of ggml.
    """

    radix: ClassVar[int] = 4
    type_size: ClassVar[int] = 66
    scale_at: ClassVar[int] = 64
    fields: ClassVar[tuple[Code, ...]] = plane_fields(0, 64, 2, 32)
