import abc

from jaxtyping import Array, Float, UInt

from ._base import AbstractScaled, Stored


class AbstractTiled(AbstractScaled):
    """A format that chooses the numbers of a tile together, where a tile is `tile`
    consecutive numbers of a row. Each row has one scale. A solver that rounds one tile
    after another, from the last of a row to the first, uses these methods."""

    @abc.abstractmethod
    def fit(self, w: Float[Array, "n k"]) -> Float[Array, "n 1"]:
        """Returns the scale with which `encode` rounds each row. It is NaN if the row
        has a number that is not finite."""

    @abc.abstractmethod
    def held(self, scale: Float[Array, "n 1"]) -> Float[Array, "n 1"]:
        """Returns the nearest scales that can be stored."""

    @abc.abstractmethod
    def nearest_tile(
        self,
        w: Float[Array, "n t"],
        target: Float[Array, "n t"],
        scale: Float[Array, "n 1"],
        feedback: Float[Array, "t t"],
        weights: Float[Array, " t"],
    ) -> UInt[Array, "n _"]:
        """Chooses the codes of a tile, from the last number to the first. The target of
        each number is corrected for the errors of the numbers after it.

        **Arguments:**

        - `w`: the original numbers, relative to which errors are computed.
        - `feedback`: `feedback[i, j]` is the factor by which the error of number `i` is
            added to target `j`. Only entries below the diagonal are used.
        - `weights`: the weight of each squared difference.
        """

    @abc.abstractmethod
    def points(self, codes: UInt[Array, "n _"]) -> Float[Array, "n t"]:
        """Decodes the codes of tiles to points, which the scale of a row multiplies."""

    @abc.abstractmethod
    def write(self, codes: UInt[Array, "n _"], scale: Float[Array, "n 1"]) -> Stored:
        """Returns the stored arrays, from the codes of all tiles of each row and its
        scale. A row whose scale is NaN decodes to NaN."""
