from collections.abc import Callable
from typing import Any, TypeAlias


# Called with the part of the work that is done, from 0 to 1, and what is being done.
Show: TypeAlias = Callable[[float, str], Any]


class Meter:
    """Adds up how much of some work is done."""

    def __init__(self, total: float | int, show: Show | None):
        self._total = total
        self._done = 0
        self._show = show

    def add(self, amount: float | int, doing: str) -> None:
        self._done += amount
        if self._show is not None:
            self._show(min(1, self._done / self._total), doing)
