import dataclasses
from typing import Any, ClassVar, Literal

import equinox as eqx
import jax.numpy as jnp

from ._blocks import absmax, steady_sum
from ._check import check_choice, check_scale
from ._grid import AbstractGrid
from ._rows import of_all_rows
from ._scale import exact_or, scale_dtype_field


class Ternary(AbstractGrid):
    """A scale times -1, 0 or 1. Five codes to a byte, as digits base three: 1.6 bits.
    Or four to a byte, which the kernels for accelerators read: 2 bits.

    - `block_size`: how many numbers share a scale. `None` for one scale for each row.
    - `scale`: `"tensor"` for one scale for the whole matrix, as in BitNet b1.58,
      instead of `"channel"`.
    - `rule`: `"absmean"` takes the mean absolute value as the scale, and rounds to its
      nearest multiple, ties to zero. `"threshold"` rounds to zero all numbers within
      0.7 times the mean absolute value, and takes the mean of the others as the scale.
    - `scale_dtype`: float32, bfloat16 or float16.
    - `radix`: 3 for five codes to a byte, 4 for four. [`eqquant.tree_prepack`][]
      converts from one to the other.

    If all numbers that share a scale are `s`, `-s` or 0, the scale is `s`, rounded to
    the `scale_dtype`. If `s` is exact in it, so are the decoded numbers. Decoded
    numbers are also exact when they are quantized again.

    This is for weights that were trained to be ternary. Much of the information in
    other weights is lost. Arrays of integers are stored like floats.

    !!! Example

        ```python
        q = eqquant.quantize(w, eqquant.Ternary(scale="tensor"))
        ```

    ??? cite "Reference"

        The Era of 1-bit LLMs: All Large Language Models are in 1.58 Bits. Ma et al.,
        2024. Section 2. (`"absmean"`.)

        Ternary Weight Networks. Li et al., 2016. Section 2.2. (`"threshold"`.)
    """

    block_size: int | None = eqx.field(default=None, static=True)
    scale: Literal["channel", "tensor"] = eqx.field(default="channel", static=True)
    rule: Literal["absmean", "threshold"] = eqx.field(default="absmean", static=True)
    scale_dtype: Any = scale_dtype_field()
    radix: int = eqx.field(default=3, static=True)  # pyright: ignore
    levels: ClassVar[int] = 3
    takes_integers: ClassVar[bool] = True

    def __check_init__(self):
        check_scale(self.scale, self.block_size)
        check_choice("rule", self.rule, "absmean", "threshold")
        check_choice("radix", self.radix, 3, 4)

    def prepacked(self, platform):
        return dataclasses.replace(self, radix=3 if platform == "cpu" else 4)

    @property
    def grid(self) -> "Ternary":
        return dataclasses.replace(self, rule="absmean")

    def fit(self, blocks, size):
        magnitude = jnp.abs(blocks)
        if self.rule == "absmean":
            mean = self._mean(magnitude, size)
        else:
            beyond = magnitude > self._threshold(blocks, size)
            number = jnp.maximum(self._sum(beyond.astype(jnp.float32)), 1)
            mean = self._sum(jnp.where(beyond, magnitude / number, 0))
        return exact_or(*self._ends(blocks), mean, self.scale_dtype)

    def to_codes(self, blocks, size, scale):
        if self.rule == "absmean":
            threshold = scale / 2
        else:
            threshold = self._threshold(blocks, size)
        up = (blocks > threshold).astype(jnp.uint8)
        down = (blocks < -threshold).astype(jnp.uint8)
        return 1 + up - down

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 1

    def _threshold(self, blocks, size):
        return 0.7 * self._mean(jnp.abs(blocks), size)

    def _mean(self, x, size):
        number = self._sum(jnp.broadcast_to(size, (*x.shape[:-1], 1)))
        # Divide first: a sum of large numbers may overflow.
        return self._sum(x / jnp.maximum(number, 1))

    def _ends(self, blocks):
        # The smallest absolute value that is not zero, and the largest.
        magnitude = jnp.where(blocks == 0, jnp.inf, jnp.abs(blocks))
        least = jnp.min(magnitude, -1, keepdims=True, initial=jnp.inf)
        ends = least, absmax(blocks)
        if self.scale == "tensor" and blocks.ndim > 2:
            both = of_all_rows(jnp.concatenate(ends, -1))
            least = jnp.min(both[..., :1], -3, keepdims=True, initial=jnp.inf)
            return least, jnp.max(both[..., 1:], -3, keepdims=True, initial=0)
        return ends

    def _sum(self, x):
        x = steady_sum(x, -1)
        if self.scale == "tensor" and x.ndim > 2:
            # The blocks of a whole matrix are its rows: the axes are `n 1 k`.
            x = steady_sum(of_all_rows(x), -3)
        return x
