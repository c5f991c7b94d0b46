import contextlib
import time
from collections.abc import Callable, Iterator

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Column

from .._progress import time_left, told_to


class Bar:
    """A progress bar that tells what is done now, and how long the rest takes.

    Work is counted in seconds of a machine whose speed is known. How long it takes here
    follows from what was done so far.

    **Arguments:**

    - `total`: how long everything takes on that machine, in seconds.
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
        # The time that was left when something was last done.
        self._left = total
        self._start = self._last = time.monotonic()
        self._task = self._progress.add_task("", total=total, left="")

    @contextlib.contextmanager
    def shown(
        self, above: Callable[[], RenderableType | None] = lambda: None
    ) -> Iterator[None]:
        """Shows the bar, below what there is. The library draws no bars over it."""

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
        """Tells what is done now."""
        self._progress.update(self._task, description=what)

    def done(self, seconds: float) -> None:
        """Counts what is done."""
        self._done += seconds
        self._last = time.monotonic()
        # At first, this machine is taken to be as fast as the other.
        slower = (self._last - self._start + 2) / (self._done + 2)
        self._left = max(0.0, self._total - self._done) * slower

    def less(self, seconds: float) -> None:
        """Counts out what need not be done."""
        self._total -= seconds
        self._left -= seconds

    @contextlib.contextmanager
    def follow(self, what: str, seconds: float) -> Iterator[None]:
        """Tells what is done in a block, and how far the library is with it, and counts
        it."""
        done = self._done

        def show(part, item):
            self.doing(f"{what}, {item}")
            self.done(max(0.0, done + part * seconds - self._done))

        self.doing(what)
        with told_to(show):
            yield
        self.done(done + seconds - self._done)

    def __rich__(self) -> RenderableType:
        # (Something that takes longer than was thought leaves the rest to do.)
        left = self._left - min(time.monotonic() - self._last, self._left / 2)
        self._progress.update(
            self._task,
            total=self._total,
            completed=self._done,
            left=time_left(left),
        )
        return self._progress
