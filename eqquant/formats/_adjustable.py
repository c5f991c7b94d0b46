import abc
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Integer

from ._base import AbstractScaled, Stored


class Parameters(NamedTuple):
    """The parameters of a block apart from its codes: its scale, and its zero-point or
    minimum, in float32. `offset` is `None` in formats without one."""

    scale: Float[Array, "..."]
    offset: Float[Array, "..."] | None


class AbstractAdjustable(AbstractScaled):
    """A format whose scales and offsets may be chosen by a solver. Each number is the
    point of a grid, times the scale of its block, with the offset of its block.

    - `joint`: whether the parameters of several blocks are rounded together. If not,
        `settled` changes no parameters that are `held`.
    """

    joint: ClassVar[bool] = False

    def unit(
        self, w: Float[Array, "*b n k"]
    ) -> tuple[Float[Array, "*b 1 1"], Stored] | None:
        """Returns the number of which all scales of a matrix are multiples, and its
        stored form, if the format has such a number. Parameters and codes are then
        chosen for the matrix divided by it."""
        return None

    @property
    @abc.abstractmethod
    def grid(self) -> Any:
        """The [`eqquant.AbstractGrid`][] of the codes. Its blocks are the blocks of the
        parameters, and its `to_codes` rounds each number to the nearest point, whatever
        the other numbers of the block are."""

    @abc.abstractmethod
    def candidates(
        self, blocks: Float[Array, "*b g s"], size: Float[np.ndarray, "*_ g 1"]
    ) -> Parameters:
        """Returns parameters that are worth a trial, each `c *b g 1`. The parameters of
        rounding to nearest come first. They need not be held."""

    @abc.abstractmethod
    def held(self, parameters: Parameters) -> Parameters:
        """Returns the nearest parameters that the format can store, as far as a block
        alone determines them."""

    @abc.abstractmethod
    def settled(self, parameters: Parameters) -> tuple[Stored, Parameters]:
        """Returns the stored arrays of all parameters of a matrix, each `*b n g`, and
        the parameters that decoding will read. A block whose scale is NaN becomes
        NaN."""

    @abc.abstractmethod
    def write(self, codes: Integer[Array, "*b n k"], settled: Stored) -> Stored:
        """Returns the stored arrays, from codes and from the arrays that `settled` and
        `unit` returned."""
