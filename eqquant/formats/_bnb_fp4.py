from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._blocks import absmax
from ._grid import AbstractGrid
from ._nearest import nearest
from ._scale import scale_dtype_field


# In the order of the codes: the magnitudes, and then their negatives.
_magnitudes = np.array([0, 0.0625, 8, 12, 4, 6, 2, 3], np.float32) / np.float32(12)
_codebook = np.concatenate([_magnitudes, -_magnitudes])
# The codes in the order of their values. (Zero comes before its negative.)
_order = np.argsort(_codebook, kind="stable").astype(np.uint8)


class BnbFP4(AbstractGrid):
    """The 4-bit floating-point numbers of bitsandbytes: a sign and 0, 1/192, 1/6, 1/4,
    1/3, 1/2, 2/3 or 1, times the largest absolute value of the block. Two codes to a
    byte, the first in the low nibble.

    These are not the numbers of [`eqquant.FP4`][]. This format is for checkpoints of
    bitsandbytes; for other weights, [`eqquant.NF4`][] is as small and more accurate.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `scale_dtype`: float32, bfloat16 or float16.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.formats.BnbFP4())
        ```

    ??? cite "Reference"

        `quantize_4bit` of bitsandbytes, with `quant_type="fp4"`.
    """

    block_size: int | None = eqx.field(default=64, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 16

    def fit(self, blocks, size):
        return absmax(blocks)

    def to_codes(self, blocks, size, scale):
        rank = nearest(blocks, size, scale, _codebook[_order])
        return jnp.asarray(_order).at[rank].get(mode="promise_in_bounds")

    def to_points(self, codes):
        return jnp.asarray(_codebook).at[codes].get(mode="promise_in_bounds")
