from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._blocks import absmax
from ._grid import AbstractGrid
from ._scale import reciprocal, scale_dtype_field


class Int8(AbstractGrid):
    """8-bit integers from -127 to 127, times the largest absolute value of the block
    divided by 127. Rounds half to even. By default a block is a whole row: each output
    channel has one scale.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `scale_dtype`: float32, bfloat16 or float16.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Int8())
        ```

    ??? cite "Reference"

        LLM.int8(): 8-bit Matrix Multiplication for Transformers at Scale. Dettmers et
        al., 2022. Section 2.1.
    """

    block_size: int | None = eqx.field(default=None, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 256
    code_dtype: ClassVar[Any] = np.dtype(np.int8)

    def fit(self, blocks, size):
        return absmax(blocks) / 127

    def to_codes(self, blocks, size, scale):
        codes = jnp.round(blocks * reciprocal(scale))
        return jnp.clip(codes, -127, 127).astype(jnp.int8)

    def to_points(self, codes):
        return codes.astype(jnp.float32)
