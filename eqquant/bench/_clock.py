import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True)
class Times:
    """The times of a function.

    - `seconds`: the time of a call in each round, in order.
    - `baseline`: the times, in the same rounds, of the function it is compared with.
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
        """The speed relative to the baseline, by the medians of the times."""
        return _quantile(self.baseline, 0.5) / self.median

    @property
    def ratio_p10(self) -> float:
        """The speed relative to the baseline, by the tenth percentiles, when the
        machine did little else."""
        return _quantile(self.baseline, 0.1) / self.p10


def _quantile(seconds, q):
    return float(np.quantile(seconds, q)) if seconds else math.nan


@dataclasses.dataclass(frozen=True)
class Clock:
    """Times functions in turn, so that other load on the machine affects all of them
    alike.

    - `budget`: the total number of seconds to spend.
    - `min_rounds`: the minimum number of rounds.
    - `rest`: the seconds to wait before each turn.
    - `settle`: the seconds for which to warm up a function in its turn. Threads that
        were idle, or busy with the previous function, take some milliseconds to start.
    - `turn`: the seconds for which to time it afterwards, with at least one call.
    """

    budget: float | int
    min_rounds: int
    rest: float | int = 0
    settle: float | int = 0.02
    turn: float | int = 0.01

    def __call__(
        self, calls: Sequence[Callable[[], Any]], spent: Callable[[float], Any]
    ) -> list[Times]:
        """Times some functions.

        - `calls`: functions that return when their work is done. The first is the
            baseline.
        - `spent`: called after each round with the part of the budget that it took.
            These parts add up to the budget, even if the rounds took longer.
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
    """Returns the mean time of a call, over as many calls as fill some seconds."""
    start = time.perf_counter()
    number, elapsed = 0, 0.0
    while number == 0 or elapsed < seconds:
        call()
        number += 1
        elapsed = time.perf_counter() - start
    return elapsed / number
