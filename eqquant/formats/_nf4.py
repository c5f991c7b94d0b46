from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._blocks import absmax
from ._grid import AbstractGrid
from ._nearest import nearest
from ._scale import scale_dtype_field


class NF4(AbstractGrid):
    """4-bit NormalFloat: sixteen quantiles of a normal distribution, times the largest
    absolute value of the block. Zero and the largest value are exact. Two codes to a
    byte, the first in the low nibble.

    Codes, scales and numbers are the same as in bitsandbytes, except that its blocks
    run over the flattened array, not within a row, and that it puts the first code in
    the high nibble.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `scale_dtype`: float32, bfloat16 or float16.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.NF4(128))
        ```

    ??? cite "Reference"

        QLoRA: Efficient Finetuning of Quantized LLMs. Dettmers et al., 2023.
        Appendix E.
    """

    block_size: int | None = eqx.field(default=64, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 16
    codebook: ClassVar[np.ndarray] = np.array(
        # fmt: off
        [
            -1.0,
            -0.6961928009986877,
            -0.5250730514526367,
            -0.39491748809814453,
            -0.28444138169288635,
            -0.18477343022823334,
            -0.09105003625154495,
            0.0,
            0.07958029955625534,
            0.16093020141124725,
            0.24611230194568634,
            0.33791524171829224,
            0.44070982933044434,
            0.5626170039176941,
            0.7229568362236023,
            1.0,
        ],
        # fmt: on
        np.float32,
    )

    def fit(self, blocks, size):
        return absmax(blocks)

    def to_codes(self, blocks, size, scale):
        return nearest(blocks, size, scale, self.codebook)

    def to_points(self, codes):
        # On CPU, a lookup is several times faster than a tree of selections.
        table = jnp.asarray(self.codebook)
        return table.at[codes].get(mode="promise_in_bounds")
