import dataclasses

from .._axes import Axis


@dataclasses.dataclass(frozen=True)
class Row:
    """What [`eqquant.report`][] says of an array.

    - `path`: `"layers.0.weight"`, as in [`eqquant.Rules`][].
    - `shape`, `dtype`: those of the array that it stands for.
    - `format`, `activation`, `axis`: how it is quantized. `None` if it is not.
    - `bits_per_weight`: scales included.
    - `before`, `after`: how many bytes it would take as an ordinary array, and takes.
      An array that is in several places counts in the first of them.
    - `sqnr`: the signal-to-quantization-noise ratio in decibels, infinite for an array
      that is unchanged. `None` if the model was not given as it was before, and for
      arrays of integers.
    - `reason`, `way_out`: why an array was left dense, and what would change that.
    - `tied_to`: the path of the first place, for the same array in another one.
    - `sharding`: how a quantized array is split over devices. `None` if it is not.
    - `declared`: how it was declared to be, if that is something else.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    format: str | None
    activation: str | None
    axis: Axis | None
    bits_per_weight: float
    before: int
    after: int
    sqnr: float | None
    reason: str
    way_out: str
    tied_to: str | None
    sharding: str | None = None
    declared: str | None = None


@dataclasses.dataclass(frozen=True)
class Total:
    """The sums of a [`eqquant.report`][], over arrays that are counted once each.

    - `arrays`: how many arrays there are, `quantized`: how many of them are quantized.
    - `size`: how many numbers they stand for.
    - `before`, `after`: how many bytes they would take as ordinary arrays, and take.
    """

    arrays: int
    quantized: int
    size: int
    before: int
    after: int

    @property
    def ratio(self) -> float:
        """How many times smaller the model has become."""
        return self.before / max(1, self.after)

    @property
    def bits_per_weight(self) -> float:
        """The average over all arrays, dense ones too."""
        return 8 * self.after / max(1, self.size)
