import abc
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Array, Float, Integer

from ._base import AbstractScaled, Stored


class Parameters(NamedTuple):
    """What a block adds to its codes: its scale, and its zero-point or its minimum.
    These are floats in float32; `offset` is `None` in formats that have none."""

    scale: Float[Array, "..."]
    offset: Float[Array, "..."] | None


class AbstractAdjustable(AbstractScaled):
    """A format whose scales and offsets may be chosen otherwise than by `encode`. This
    is what a solver asks of a format: each number is the point of a grid, times the
    scale of its block, with the offset of its block.

    - `joint`: whether the parameters of several blocks are rounded together. Otherwise
        `settled` changes nothing that is `held`.
    """

    joint: ClassVar[bool] = False

    def unit(
        self, w: Float[Array, "*b n k"]
    ) -> tuple[Float[Array, "*b 1 1"], Stored] | None:
        """What all scales of a matrix are multiples of, if the format stores such a
        number, and how it is stored. Then parameters and codes are chosen for the
        matrix divided by it."""
        return None

    @property
    @abc.abstractmethod
    def grid(self) -> Any:
        """The [`eqquant.AbstractGrid`][] of the codes. Its blocks are those that the
        parameters belong to, and its `to_codes` rounds each number to the nearest
        point, whatever else is in the block."""

    @abc.abstractmethod
    def candidates(
        self, blocks: Float[Array, "*b g s"], size: Float[np.ndarray, "*_ g 1"]
    ) -> Parameters:
        """Parameters that are worth a trial, each `c *b g 1`: those of rounding to
        nearest come first. They need not be held."""

    @abc.abstractmethod
    def held(self, parameters: Parameters) -> Parameters:
        """The nearest parameters that the format can store, as far as that can be said
        of one block alone."""

    @abc.abstractmethod
    def settled(self, parameters: Parameters) -> tuple[Stored, Parameters]:
        """The stored arrays of all parameters of a matrix, each `*b n g`, and the
        parameters as they will be read. A block whose scale is NaN becomes NaN."""

    @abc.abstractmethod
    def write(self, codes: Integer[Array, "*b n k"], settled: Stored) -> Stored:
        """What is stored, from codes and what `settled` has returned, with what is
        stored of the `unit`."""
