import dataclasses
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np

from ._dither import AbstractDithered
from ._scale import scale_dtype_field


class Square4(AbstractDithered):
    """4-bit numbers whose square roots are equally spaced, for the state of an
    optimizer. Two to a byte, the first in the low nibble.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `signed`: if true, the squares of 0 to 7 and their negatives, times the largest
        absolute value of the block divided by 49. If false, the squares of 1 to 16,
        times the largest value of the block divided by 256. The latter is for second
        moments, by whose roots optimizers divide: zero is not a point, and numbers
        below the lowest point become this point.
    - `dithered`: as in [`eqquant.Dynamic8`][].
    - `scale_dtype`: float32, bfloat16 or float16.

    !!! Example

        ```python
        nu = eqquant.quantize(grad**2, eqquant.Square4(signed=False))
        ```

    ??? cite "Reference"

        Memory Efficient Optimizers with 4-bit States. Li et al., 2023. (Section 4.1, on
        second moments without zero; the points there are equally spaced.)
    """

    block_size: int | None = eqx.field(default=128, static=True)
    signed: bool = eqx.field(default=True, static=True)
    dithered: bool = eqx.field(default=False, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 16

    @property
    def grid(self) -> "Square4":
        return dataclasses.replace(self, dithered=False)

    def fit(self, blocks, size):
        magnitude = jnp.abs(blocks) if self.signed else blocks
        largest = jnp.max(magnitude, axis=-1, keepdims=True, initial=0)
        return largest / self._last**2

    def rounded_at(self, unit, threshold):
        magnitude = jnp.abs(unit) if self.signed else jnp.maximum(unit, 0)
        # The root of the point below, and the fraction of the way to the point above.
        root = jnp.clip(jnp.floor(jnp.sqrt(magnitude)), self._first, self._last - 1)
        part = (magnitude - root**2) / (2 * root + 1)
        root += (part > threshold).astype(jnp.float32)
        code = jnp.where(unit < 0, -root, root) + 8 if self.signed else root - 1
        return code.astype(jnp.uint8)

    def to_points(self, codes):
        codes = codes.astype(jnp.float32)
        if self.signed:
            return (codes - 8) * jnp.abs(codes - 8)
        return (codes + 1) ** 2

    @property
    def _first(self):
        return np.float32(0 if self.signed else 1)

    @property
    def _last(self):
        return np.float32(7 if self.signed else 16)
