import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ._decide import Decision


@contextlib.contextmanager
def progress(
    decisions: Sequence[Decision], compiles: bool
) -> Iterator[Callable[[Decision], None]]:
    """A progress bar on a terminal, once that has taken two seconds. The function is
    called before each decision is carried out: the bar has its path, the numbers a
    second and the time left. If that is more than a minute, a line says so.

    **Arguments:**

    - `compiles`: whether it takes long until the first array of each shape is rounded.
        Then there is a bar at once, which says that it is compiling.
    """
    sizes = [_size(decision) for decision in decisions]
    watch = _Watch(sum(sizes), 0 if compiles else 2)
    shapes = set()

    def begin(decision):
        size = _size(decision)
        if size == 0:
            return
        shape = decision.info.shape, decision.format, decision.info.axis
        first = compiles and shape not in shapes
        shapes.add(shape)
        watch.begin(decision.info.path, size, first)

    try:
        yield begin
    finally:
        watch.stop()


class _Watch:
    def __init__(self, total, after):
        self._total, self._after = total, after
        self._done = self._size = self._counted = 0
        self._start = self._last = time.monotonic()
        self._seconds = 0.0
        self._first = self._told = False
        self._bar: Any = None
        self._task: Any = None

    def begin(self, path, size, first):
        now = time.monotonic()
        self._done += self._size
        if not self._first:
            # (Without what was compiling.)
            self._counted += self._size
            self._seconds += now - self._last
        self._last, self._size, self._first = now, size, first
        if self._bar is None and now - self._start >= self._after:
            self._bar = _bar()
            self._task = self._bar.add_task("", total=self._total, rate="", left="")
            self._bar.start()
        if self._bar is not None:
            text = f"{path} (compiling)" if first else path
            rate, left = self._rate_and_left()
            self._bar.update(
                self._task,
                completed=self._done,
                description=text,
                rate=rate,
                left=left,
                refresh=True,
            )

    def stop(self):
        if self._bar is not None:
            self._bar.stop()

    def _rate_and_left(self):
        if self._counted == 0 or self._seconds <= 0:
            return "", ""
        rate = self._counted / self._seconds
        left = (self._total - self._done) / rate
        if left > 60 and not self._told:
            self._told = True
            self._bar.console.print(
                f"Quantizing {self._total / 1e6:.3g} million numbers will take about "
                f"{left / 60:.2g} minutes."
            )
        return f"{rate / 1e6:.2g} M/s", f"{left:.0f} s left"


def _size(decision):
    return math.prod(decision.info.shape) if decision.info and decision.format else 0


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("Quantizing {task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TextColumn("{task.fields[rate]}"),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
