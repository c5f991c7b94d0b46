import dataclasses
import math
from typing import Any

from ._plan import Planned


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What became of an array.

    - `name`, `shape`, `dtype`: those that it had.
    - `format`: that it is in. `None` if it is not quantized.
    - `before`, `after`: how many bytes it would take as an ordinary array, and takes.
    - `sqnr`: the signal-to-quantization-noise ratio in decibels, if it was quantized.
    - `reason`, `way_out`: why it was left as it was, and what would change that.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str | None
    axis: Any
    before: int
    after: int
    sqnr: float | None
    reason: str
    way_out: str

    @property
    def bits_per_weight(self) -> float:
        """Scales included."""
        return 8 * self.after / max(1, math.prod(self.shape))


def outcome(planned: Planned, after: int, sqnr: float | None) -> Outcome:
    entry = planned.entry
    kept = planned.format is None
    format = entry.format if kept else planned.format
    return Outcome(
        name=planned.name,
        shape=entry.shape,
        dtype=entry.dtype.name,
        format=None if format is None else str(format),
        axis=entry.axis if kept else planned.axis,
        before=planned.nbytes,
        after=after,
        sqnr=sqnr,
        reason=planned.reason,
        way_out=planned.way_out,
    )
