import contextlib
import io
import time
from collections.abc import Iterator

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn


class Bar:
    """A progress bar that tells what is done now, and how long the rest takes.

    Work is counted in seconds of a machine whose speed is known. How long it takes here
    follows from what was done so far.

    **Arguments:**

    - `total`: how long everything takes on that machine, in seconds.
    """

    def __init__(self, total: float, console: Console):
        self._progress = Progress(
            BarColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.description}"),
            console=console,
            auto_refresh=False,
            disable=not console.is_terminal,
        )
        self._start = time.monotonic()
        self._task = self._progress.add_task("", total=total, left=_left(total))

    def doing(self, what: str) -> None:
        """Tells what is done now."""
        self._progress.update(self._task, description=what)

    def done(self, seconds: float) -> None:
        """Counts what is done."""
        self._progress.advance(self._task, seconds)
        (task,) = self._progress.tasks
        # At first, this machine is taken to be as fast as the other.
        slower = (time.monotonic() - self._start + 2) / (task.completed + 2)
        left = max(0, (task.total or 0) - task.completed) * slower
        self._progress.update(self._task, left=_left(left))

    def less(self, seconds: float) -> None:
        """Counts out what need not be done."""
        (task,) = self._progress.tasks
        total = (task.total or 0) - seconds
        self._progress.update(self._task, total=total, left=_left(total))

    def __rich__(self) -> RenderableType:
        return self._progress


@contextlib.contextmanager
def without_bars(console: Console) -> Iterator[None]:
    """Without the progress bars of the library, which would be drawn over that of the
    demo. What else is written to stderr is printed."""
    with contextlib.redirect_stderr(io.StringIO()) as written:
        yield
    if written.getvalue():
        console.print(written.getvalue(), markup=False)


def _left(seconds):
    rounded = 5 * -int(-seconds // 5)
    return f"{rounded // 60}:{rounded % 60:02} left"
