import dataclasses
import functools as ft
from typing import Any, ClassVar

import equinox as eqx
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ._dither import AbstractDithered
from ._scale import scale_dtype_field


_decades = 7


@ft.cache
def codebook(signed: bool) -> Float[np.ndarray, "256"]:
    """Returns the points of `Dynamic8`, in ascending order."""
    positive = np.concatenate([_decade(i, signed) for i in range(_decades)])
    negative = -positive[::-1] if signed else positive[:0]
    return np.concatenate([negative, [0], positive, [1]], dtype=np.float32)


def _number(decade, signed):
    return 2**decade if signed else 2 * 2**decade


def _decade(decade, signed):
    # The middles of equal parts. Computed in float32 and from both ends, like PyTorch,
    # so that they are the numbers of bitsandbytes to the last bit.
    number = _number(decade, signed)
    low, i = np.float32(0.1), np.arange(number + 1)
    step = (1 - low) / np.float32(number)
    up, down = low + np.float64(step) * i, 1 - np.float64(step) * i[::-1]
    edges = np.where(i < (number + 1) // 2, up, down).astype(np.float32)
    middles = (edges[:-1] + edges[1:]) / np.float32(2)
    return middles * np.float32(10.0 ** (decade - _decades + 1))


class Dynamic8(AbstractDithered):
    """8-bit numbers for arrays that span many orders of magnitude, such as the state of
    an optimizer: seven decades, each with twice as many points as the one below it,
    times the largest absolute value of the block.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `signed`: if false, there are twice as many points and no sign. This is for
        non-negative numbers; negative numbers become zero. A positive number never
        becomes zero, since optimizers divide by second moments.
    - `dithered`: whether to round up or down pseudo-randomly, by a hash of the bits of
        each number, so that the mean of the results is the number (except for a
        positive number below the lowest point, which becomes this point if there is no
        sign). The steps of a running mean are smaller than the distances between
        points; rounded to nearest, the mean would never move.
    - `scale_dtype`: float32, bfloat16 or float16.

    The points are those of bitsandbytes. Zero and the positive end of a block are
    exact, but -1 is not a point. So quantizing decoded numbers again may change them.
    With `dithered`, a block whose largest number is negative is scaled so that this
    number is the lowest point.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Dynamic8(signed=False))
        ```

    ??? cite "Reference"

        8-bit Optimizers via Block-wise Quantization. Dettmers et al., 2022. Sections
        1.3 and 2.
    """

    block_size: int | None = eqx.field(default=256, static=True)
    signed: bool = eqx.field(default=True, static=True)
    dithered: bool = eqx.field(default=False, static=True)
    scale_dtype: Any = scale_dtype_field()
    levels: ClassVar[int] = 256
    code_dtype: ClassVar[Any] = np.dtype(np.uint8)

    @property
    def grid(self) -> "Dynamic8":
        return dataclasses.replace(self, dithered=False)

    def fit(self, blocks, size):
        if self.signed and self.dithered:
            last = codebook(True)[-2]
            magnitude = jnp.where(blocks < 0, -blocks / last, blocks)
        else:
            magnitude = jnp.abs(blocks) if self.signed else blocks
        return jnp.max(magnitude, axis=-1, keepdims=True, initial=0)

    def rounded_at(self, unit, threshold):
        *_, last, end = codebook(self.signed)
        beyond = (unit > _between(last, end, threshold)).astype(jnp.int32)
        if not self.signed:
            return (self._rank(unit, threshold) + beyond).astype(jnp.uint8)
        rank = self._rank(jnp.abs(unit), threshold)
        return (127 + jnp.where(unit < 0, -rank, rank + beyond)).astype(jnp.uint8)

    def to_points(self, codes):
        table = jnp.asarray(codebook(self.signed))
        return table.at[codes].get(mode="promise_in_bounds")

    def _rank(self, unit, threshold):
        # Counts the points up to the one that a number is rounded to, except the last
        # point. The points of a decade are evenly spaced, so they need no comparisons.
        rank = jnp.zeros(unit.shape, jnp.int32)
        below = np.float32(0)
        for i in range(_decades):
            points = _decade(i, self.signed)
            first = i == 0 and not self.signed
            edge = below if first else _between(below, points[0], threshold)
            power, number = 10.0 ** (i - _decades + 1), len(points)
            within = (unit / power - 0.1) * (number / 0.9) + (0.5 - threshold)
            within = jnp.clip(jnp.ceil(within) - 1, 0, number - 1)
            rank += (unit > edge).astype(jnp.int32) + within.astype(jnp.int32)
            below = points[-1]
        return rank


def _between(low, high, part):
    if isinstance(part, float):
        return np.float32(low + part * (np.float64(high) - low))
    return low + part * (high - low)
