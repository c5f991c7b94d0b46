import abc
from typing import Any

from jaxtyping import Array, Float

from ._base import AbstractFormat, Stored


class AbstractScaled(AbstractFormat):
    """A format with a scale for each block, which is a float. It is stored as the bits
    of that, under the name `"scale"`."""

    @property
    @abc.abstractmethod
    def scale_dtype(self) -> Any:
        """The dtype of the scales: float32, bfloat16 or float16."""

    @abc.abstractmethod
    def scales(self, stored: Stored, tail: int) -> Float[Array, "*b g"]:
        """The scales, in float32."""
