import abc
from typing import Any

import equinox as eqx
from jaxtyping import Array, Float

from ._base import AbstractFormat, Stored


class AbstractScaled(AbstractFormat):
    """A format with a scale for each block, of the dtype `scale_dtype`. In float32,
    bfloat16 or float16; but stored as bits, under the name `"scale"`."""

    scale_dtype: eqx.AbstractVar[Any]

    @abc.abstractmethod
    def scales(self, stored: Stored, tail: int) -> Float[Array, "*b g"]:
        """The scales, in float32."""
