from typing import ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._bit_fields import byte_fields, packed_fields, plane_fields
from ._check import check_choice
from ._fp4 import FP4, to_e2m1
from ._mx import AbstractMX
from ._packing import pack, unpack
from ._scale import divided
from .gguf._base import AbstractGGUF, as_blocks, in_rows, split_codes
from .gguf._fields import read, write


class MXFP4(AbstractMX, AbstractGGUF):
    """4-bit floating-point numbers, `e2m1`, with a power of two as the scale of each 32
    numbers. Numbers above 6 saturate. 4.25 bits. Two codes to a byte, the first in the
    low nibble.

    - `ties`: how ties are rounded. `"even"` rounds them to the even code, as the
      specification recommends. `"zero"` rounds them towards zero, and never writes a
      negative zero, as ggml does.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.MXFP4())
        ```

    ??? cite "Reference"

        OCP Microscaling Formats (MX) Specification, version 1.0. Section 5.3.3.
    """

    ties: Literal["even", "zero"] = eqx.field(default="even", static=True)
    type_size: ClassVar[int] = 17
    base: ClassVar[FP4] = FP4(32, jnp.bfloat16)
    largest_power: ClassVar[int] = 2

    def __check_init__(self):
        check_choice("ties", self.ties, "even", "zero")

    def to_codes(self, blocks, size, scale):
        return to_e2m1(divided(blocks, scale), self.ties)

    def write(self, codes, settled):
        if self.ties == "zero":
            codes = jnp.where(codes == 8, np.uint8(0), codes)
        return {"codes": self.base.pack(codes), **settled}

    def without_infinities(self, stored):
        return stored

    @property
    def stored_fields(self):
        return {"codes": packed_fields(_fields, 16), "scale": byte_fields(0, 1)}

    def from_blocks(self, blocks):
        blocks = as_blocks(blocks, self.type_size)
        codes = pack(in_rows(read(blocks, _fields)), 16)
        return {"codes": codes, "scale": blocks[..., 0]}

    def to_blocks(self, stored, tail):
        codes = split_codes(unpack(stored["codes"], 16, tail), self.block_size, 0)
        scale = stored["scale"][..., None]
        return in_rows(write(codes, _fields, scale, 0, self.type_size))


# The codes in a block of a GGUF file. The scale comes before them.
_fields = plane_fields(1, 16, 4, 16)
