from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from .._blocks import absmax
from .._scale import reciprocal
from ._base import AbstractGGUFGrid
from ._search import half_away


class AbstractTQ(AbstractGGUFGrid):
    """-1, 0 or 1, times the largest absolute value of the block, in float16. Subclasses
    differ in how they pack the codes."""

    block_size: ClassVar[int] = 256
    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    levels: ClassVar[int] = 3

    def fit(self, blocks, size):
        return absmax(blocks)

    def to_codes(self, blocks, size, scale):
        codes = 1 + half_away(blocks * reciprocal(scale))
        return jnp.clip(codes, 0, 2).astype(jnp.uint8)

    def to_points(self, codes):
        return codes.astype(jnp.float32) - 1
