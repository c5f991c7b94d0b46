from typing import Any

import equinox as eqx
import jax.numpy as jnp

from ._fp8 import as_float8, FP8
from ._mx import AbstractMX


class MXFP8(AbstractMX):
    """8-bit floating-point numbers, with a power of two as the scale of each 32
    numbers. Rounds half to even; numbers above the largest element saturate. 8.25 bits.

    - `dtype`: `"e4m3"` or `"e5m2"`, as in [`eqquant.FP8`][].

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.MXFP8("e5m2"))
        ```

    ??? cite "Reference"

        OCP Microscaling Formats (MX) Specification, version 1.0. Section 5.3.1.
    """

    dtype: Any = eqx.field(default="e4m3", static=True, converter=as_float8)

    @property
    def base(self) -> FP8:
        return FP8(self.dtype, self.block_size, scale_dtype=jnp.bfloat16)

    @property
    def largest_power(self) -> int:
        return {"float8_e4m3fn": 8, "float8_e5m2": 15}[self.dtype.name]

    def to_codes(self, blocks, size, scale):
        return self.base.to_codes(blocks, size, scale)
