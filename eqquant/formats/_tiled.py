import abc

from jaxtyping import Array, Float, UInt

from ._base import AbstractScaled, Stored


class AbstractTiled(AbstractScaled):
    """A format whose numbers are chosen together: those of a tile, which is `tile`
    consecutive numbers of a row. There is one scale for each row. This is what a solver
    asks of it, which rounds one tile after another, from the last one of a row to the
    first."""

    @abc.abstractmethod
    def fit(self, w: Float[Array, "n k"]) -> Float[Array, "n 1"]:
        """The scale of each row by which `encode` rounds it. NaN if the row has a
        number that is not finite."""

    @abc.abstractmethod
    def held(self, scale: Float[Array, "n 1"]) -> Float[Array, "n 1"]:
        """The nearest scales that can be stored."""

    @abc.abstractmethod
    def nearest_tile(
        self,
        w: Float[Array, "n t"],
        target: Float[Array, "n t"],
        scale: Float[Array, "n 1"],
        feedback: Float[Array, "t t"],
        weights: Float[Array, " t"],
    ) -> UInt[Array, "n _"]:
        """The codes of a tile, from the last number to the first. What each should come
        near to is its target, and what the errors of those after it ask of it.

        **Arguments:**

        - `w`: what errors are counted from.
        - `feedback`: how much of the error of each number (the first axis) each number
            takes. Only what is below the diagonal counts.
        - `weights`: what the square of each difference counts.
        """

    @abc.abstractmethod
    def points(self, codes: UInt[Array, "n _"]) -> Float[Array, "n t"]:
        """What the codes of some tiles stand for, times the scale of the row."""

    @abc.abstractmethod
    def write(self, codes: UInt[Array, "n _"], scale: Float[Array, "n 1"]) -> Stored:
        """What is stored, from the codes of all tiles of each row and its scale. A row
        whose scale is NaN becomes NaN."""
