from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Integer

from ._adjustable import Parameters
from ._blocks import absmax
from ._candidates import scales_around
from ._grid import AbstractGrid
from ._scale import divided, scale_dtype_field


largest_e2m1 = 6.0
_magnitudes = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_codebook = np.concatenate([_magnitudes, -_magnitudes])


def to_e2m1(
    x: Float[Array, "*s"], ties: Literal["even", "zero"] = "even"
) -> Integer[Array, "*s"]:
    """Returns the codes of the nearest numbers. Numbers above 6 become 6.

    Ties go to the even code; with `ties="zero"`, to the number nearer to zero, and zero
    then has no sign.
    """
    magnitude = jnp.abs(x)
    code = jnp.zeros(x.shape, jnp.uint8)
    for i, edge in enumerate((_magnitudes[1:] + _magnitudes[:-1]) / 2):
        to_next = ties == "even" and i % 2 == 1
        beyond = magnitude >= edge if to_next else magnitude > edge
        code += beyond.astype(jnp.uint8)
    negative = jnp.signbit(x) if ties == "even" else (x < 0) & (code > 0)
    return code | negative.astype(jnp.uint8) << np.uint8(3)


class FP4(AbstractGrid):
    """4-bit floating-point numbers, `e2m1`: a sign and 0, 0.5, 1, 1.5, 2, 3, 4 or 6,
    times the largest absolute value of the block divided by 6. Rounds half to even. Two
    codes to a byte, the first in the low nibble.

    [`eqquant.MXFP4`][] and [`eqquant.NVFP4`][] are the same numbers with smaller
    scales.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `scale_dtype`: float32, bfloat16 or float16.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.FP4(16))
        ```

    ??? cite "Reference"

        OCP Microscaling Formats (MX) Specification, version 1.0. Section 5.3.3.
    """

    block_size: int | None = eqx.field(default=32, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 16

    def fit(self, blocks, size):
        largest = absmax(blocks)
        return divided(largest, largest_e2m1)

    def candidates(self, blocks, size):
        # With the largest number at 4, its neighbours are nearer than with it at 6.
        return Parameters(scales_around(self, blocks, size, most=1.55), None)

    def to_codes(self, blocks, size, scale):
        return to_e2m1(divided(blocks, jnp.where(scale == 0, 1, scale)))

    def to_points(self, codes):
        return jnp.asarray(_codebook).at[codes].get(mode="promise_in_bounds")
