import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

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


@dataclasses.dataclass(frozen=True)
class Clock:
    """Times functions in turn, so that what else the machine does is the same for all
    of them.

    - `budget`: for how many seconds to go on.
    - `min_rounds`: how many rounds to make at least.
    - `rest`: how many seconds to wait before each turn.
    - `settle`: for how many seconds to call a function in its turn before that is
        timed: threads that were idle, or that spread out for what came before, take
        some milliseconds until they all work.
    - `turn`: for how many seconds to time it then, each at least once.
    """

    budget: float | int
    min_rounds: int
    rest: float | int = 0
    settle: float | int = 0.02
    turn: float | int = 0.01

    def __call__(
        self, calls: Sequence[Callable[[], Any]], spent: Callable[[float], Any]
    ) -> list[Times]:
        """**Arguments:**

        - `calls`: each returns once its work is done. The first is what the others are
            compared with.
        - `spent`: called after each round with how much of the budget that took. It
            comes to all of the budget, whether or not that was enough.
        """
        rounds = []
        start = time.perf_counter()
        done = 0
        while done < 1:
            rounds.append([self._seconds(call) for call in calls])
            elapsed = time.perf_counter() - start
            part = elapsed / self.budget if self.budget > 0 else 1
            before, done = done, min(1, part, len(rounds) / self.min_rounds)
            spent((done - before) * self.budget)
        seconds = list(zip(*rounds))
        return [Times(its, seconds[0]) for its in seconds]

    def _seconds(self, call):
        time.sleep(self.rest)
        _repeat(call, self.settle)
        return _repeat(call, self.turn)


def _repeat(call: Callable[[], Any], seconds: float | int) -> float:
    """How long a call takes, of as many as fill some seconds."""
    start = time.perf_counter()
    number, elapsed = 0, 0.0
    while number == 0 or elapsed < seconds:
        call()
        number += 1
        elapsed = time.perf_counter() - start
    return elapsed / number
