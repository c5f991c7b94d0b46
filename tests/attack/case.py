import collections
import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from .oracle import unlike


_T = TypeVar("_T")


@dataclasses.dataclass
class Case:
    """One case: what it draws from, what it met, and what went wrong in it.

    - `lenient`: whether NaN and infinities are as good as each other.
    - `met`: how many checks there were of each `(column, name)`, such as
      `("format", "NF4")`.
    - `failures`: a line for each check that failed.
    """

    seed: int
    number: int
    lenient: bool = False
    met: collections.Counter = dataclasses.field(default_factory=collections.Counter)
    failures: list[str] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.rng = np.random.default_rng([self.seed, self.number])

    def pick(self, options: Sequence[_T]) -> _T:
        return options[int(self.rng.integers(len(options)))]

    def chance(self, probability: float) -> bool:
        return bool(self.rng.random() < probability)

    def integer(self, low: int, high: int) -> int:
        """From `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def check(self, what: str, found: str | None, **names: Any) -> None:
        """Counts a check, of what is said in `names`. `found` is what is wrong, or
        `None`."""
        if self.lenient and found is not None and found.endswith(unlike):
            found = None
        self.met["check", ""] += 1
        self.met.update((column, str(name)) for column, name in names.items())
        if found is not None:
            about = ", ".join(f"{name}" for name in names.values())
            self.failures.append(f"{what} [{about}]: {found}")

    def expect(self, what: str, holds: Any, **names: Any) -> None:
        """The same of what holds or not."""
        self.check(what, None if bool(holds) else "does not hold", **names)
