from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._blocks import absmax, steady_sum
from ._grid import AbstractGrid
from ._scale import exact_or, scale_dtype_field


class Binary(AbstractGrid):
    """The sign of each number (positive for zero) times the mean absolute value of its
    block. Eight codes to a byte, the first in the lowest bit. Blocks of `s` and `-s`
    are exact, up to the rounding of `s` to the `scale_dtype`.

    This is for weights that were trained to be binary. Most of the information in other
    weights is lost. Arrays of integers are stored like floats.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `scale_dtype`: float32, bfloat16 or float16.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Binary(128))
        ```

    ??? cite "Reference"

        XNOR-Net: ImageNet Classification Using Binary Convolutional Neural Networks.
        Rastegari et al., 2016. Section 3.1.
    """

    block_size: int | None = eqx.field(default=None, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 2
    takes_integers: ClassVar[bool] = True

    def fit(self, blocks, size):
        # Divide first: a sum of large numbers may overflow.
        magnitude = jnp.abs(blocks)
        mean = steady_sum(magnitude / jnp.maximum(size, 1), -1)
        inside = np.arange(blocks.shape[-1]) < size
        some = jnp.where(inside, magnitude, jnp.inf)
        least = jnp.min(some, -1, keepdims=True, initial=jnp.inf)
        return exact_or(least, absmax(blocks), mean, self.scale_dtype)

    def to_codes(self, blocks, size, scale):
        return (blocks >= 0).astype(jnp.uint8)

    def to_points(self, codes):
        return 2 * codes.astype(jnp.float32) - 1
