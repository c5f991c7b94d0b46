import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from .._progress import time_left, told_to


class Bar:
    """A progress bar with the current step and the time that is left.

    Work is counted in seconds on a reference machine. The time that is left is
    estimated from the speed of this machine so far.

    - `total`: the total time on the reference machine, in seconds.
    """

    def __init__(self, total: float, console: Console):
        self._progress = Progress(
            BarColumn(20, table_column=Column(min_width=20)),
            TextColumn("{task.fields[left]}", table_column=Column(min_width=9)),
            TextColumn("{task.description}", markup=False),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._console = console
        self._total, self._done = total, 0.0
        # The time that was left at `_last`.
        self._left = total
        self._start = self._last = time.monotonic()
        self._task = self._progress.add_task("", total=total, left="")

    @contextlib.contextmanager
    def shown(
        self, above: Callable[[], RenderableType | None] = lambda: None
    ) -> Iterator[None]:
        """Shows the bar below `above`. Meanwhile, the library's own progress bars are
        off."""

        def all():
            rest = above()
            return self if rest is None else Group(rest, self)

        live = Live(
            get_renderable=all,
            console=self._console,
            refresh_per_second=4,
            transient=True,
        )
        with live, told_to(lambda part, what: None):
            yield

    def doing(self, what: str) -> None:
        """Shows the current step."""
        self._progress.update(self._task, description=what)

    def done(self, seconds: float) -> None:
        """Counts finished work."""
        self._done += seconds
        self._last = time.monotonic()
        # At first, this machine is assumed to be as fast as the reference machine.
        slower = (self._last - self._start + 2) / (self._done + 2)
        self._left = max(0.0, self._total - self._done) * slower

    def less(self, seconds: float) -> None:
        """Removes work that need not be done."""
        self._total -= seconds
        self._left -= seconds

    @contextlib.contextmanager
    def follow(self, what: str, seconds: float) -> Iterator[None]:
        """Shows the step that a block runs and the library's progress in it, and counts
        its work."""
        done = self._done

        def show(part, item):
            self.doing(f"{what}, {item}")
            self.done(max(0.0, done + part * seconds - self._done))

        self.doing(what)
        with told_to(show):
            yield
        self.done(done + seconds - self._done)

    def __rich__(self) -> RenderableType:
        # Even if a step takes longer than expected, at least half of the time stays
        # left, for the other steps.
        left = self._left - min(time.monotonic() - self._last, self._left / 2)
        self._progress.update(
            self._task,
            total=self._total,
            completed=self._done,
            left=time_left(left),
        )
        return self._progress
