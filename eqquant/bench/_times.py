import dataclasses
import math

import numpy as np


@dataclasses.dataclass(frozen=True)
class Times:
    """How long something took.

    - `seconds`: in each round, in order.
    - `baseline`: the same of what it is compared with, which was called in turn with
      it.
    """

    seconds: tuple[float, ...]
    baseline: tuple[float, ...]

    @property
    def median(self) -> float:
        return _quantile(self.seconds, 0.5)

    @property
    def p10(self) -> float:
        return _quantile(self.seconds, 0.1)

    @property
    def p90(self) -> float:
        return _quantile(self.seconds, 0.9)

    @property
    def ratio(self) -> float:
        """How many times faster than the baseline this is, by the medians."""
        return _quantile(self.baseline, 0.5) / self.median

    @property
    def ratio_p10(self) -> float:
        """The same by the tenth percentiles: times at which the machine did little
        else."""
        return _quantile(self.baseline, 0.1) / self.p10


def _quantile(seconds, q):
    return float(np.quantile(seconds, q)) if seconds else math.nan
