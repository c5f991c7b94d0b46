from typing import Any, ClassVar

import equinox as eqx
import numpy as np

from .._bit_fields import plane_fields
from ._base import AbstractGGUFGrid


class AbstractGGUFPlanes(AbstractGGUFGrid):
    """A type whose blocks are the scale and then the codes, packed as by `planes`.

    - `width`: the number of bytes in which codes are side by side.
    """

    scale_dtype: ClassVar[Any] = np.dtype(np.float16)
    scale_at: ClassVar[int] = 0
    width: eqx.AbstractClassVar[int]

    @property
    def fields(self):
        return plane_fields(2, self.type_size - 2, int(self.bits), self.width)
