"""Progress bars for long work, on a terminal: the current item, the speed, and the time
that is left."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeAlias, TypeVar


_Item = TypeVar("_Item")
# Called with the fraction of the work that is done, and a description of the current
# item.
Listener: TypeAlias = Callable[[float, str], Any]
_listeners: list[Listener] = []


@contextlib.contextmanager
def told_to(listener: Listener) -> Iterator[None]:
    """Passes progress, of any thread, to a function instead of showing bars."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def time_left(seconds: float) -> str:
    """Formats a time, rounded up to five seconds."""
    rounded = 5 * -int(-seconds // 5)
    return f"{rounded // 60}:{rounded % 60:02} left"


class Watched(Generic[_Item]):
    """Items to iterate over, with a progress bar on a terminal once they have taken two
    seconds. A line above it gives the expected total time, if that is more than a
    minute.

    - `items`: the items.
    - `label`: the name of the task.
    - `name`: returns the name of an item.
    - `size`: returns the number of elements of an item, if its time is proportional to
        that. Otherwise, all items are assumed to take equally long.
    """

    def __init__(
        self,
        items: Iterable[_Item],
        label: str,
        name: Callable[[_Item], str] = lambda _: "",
        size: Callable[[_Item], int] | None = None,
    ):
        self._items, self._label, self._name = items, label, name
        self._is_sized = size is not None
        self._size = (lambda _: 1) if size is None else size
        known = isinstance(items, list | tuple)
        self._number = len(items) if known else None
        self._total = sum(map(self._size, items)) if known else None
        # `_usual` leaves out items that took long for another reason (see `note`).
        self._done, self._usual = _Work(), _Work()
        self._item = ""
        self._is_noted = self._is_told = False
        self._bar: Any = None
        self._lines: list[str] = []

    def note(self, what: str) -> None:
        """Shows extra work for an item, such as compiling. The item's time is then not
        used to predict the next ones."""
        self._is_noted = True
        self._open()
        self._show(f"({what})")

    def say(self, line: str) -> None:
        """Prints a line above the bar, once the bar is shown."""
        self._lines.append(line)

    def __iter__(self) -> Iterator[_Item]:
        start = time.monotonic()
        try:
            for item in self._items:
                if self._done.seconds > 2:
                    self._open()
                self._item, self._is_noted = self._name(item), False
                self._show()
                yield item
                end = time.monotonic()
                self._count(self._size(item), end - start)
                start = end
        finally:
            if self._bar is not None:
                self._bar.stop()

    def _count(self, size, seconds):
        self._done.add(size, seconds)
        if not self._is_noted:
            self._usual.add(size, seconds)
        if self._number is None or self._is_told:
            return
        if self._usual.number >= min(8, self._number - self._done.number):
            self._is_told = True
            self._tell(self._done.seconds + (self._left() or 0.0))

    def _left(self):
        # The time that is left, in seconds. `None` if it is not known.
        if self._total is None or self._usual.size == 0:
            return None
        size = self._total - self._done.size
        return size * self._usual.seconds / self._usual.size

    def _tell(self, seconds):
        if seconds > 60:
            self._open()
            about = "a minute" if seconds < 90 else f"{seconds / 60:.0f} minutes"
            self._print(f"{self._label} takes about {about}.")

    def _open(self):
        if self._bar is None and not _listeners:
            self._bar = _bar()
            self._bar.add_task(self._label, total=self._total, **_no_fields)
            self._bar.start()
        for line in self._lines:
            self._print(line)
        self._lines = []

    def _print(self, line):
        if self._bar is not None and not self._bar.disable:
            self._bar.console.print(line, markup=False, highlight=False)

    def _show(self, note=""):
        number = f"{self._done.number}/{self._number or '?'}"
        if _listeners:
            part = self._done.size / self._total if self._total else 0.0
            _listeners[-1](part, " ".join(filter(None, (number, self._item, note))))
        elif self._bar is not None:
            left = self._left()
            (task,) = self._bar.task_ids
            self._bar.update(
                task,
                completed=self._done.size,
                number=number,
                rate=self._rate(),
                left="" if left is None else time_left(left),
                item=self._item,
                note=note,
                refresh=True,
            )

    def _rate(self):
        size, seconds = self._usual.size, self._usual.seconds
        if size == 0 or seconds == 0:
            return ""
        if self._is_sized:
            return f"{size / seconds / 1e6:.2g} M/s"
        each = seconds / size
        return f"{1 / each:.1f}/s" if each < 1 else f"{each:.1f} s each"


class _Work:
    def __init__(self):
        self.number = self.size = 0
        self.seconds = 0.0

    def add(self, size, seconds):
        self.number += 1
        self.size += size
        self.seconds += seconds


_no_fields = dict.fromkeys(("number", "rate", "left", "item", "note"), "")


def _console():
    from rich.console import Console

    return Console(stderr=True)


def _bar():
    from rich.progress import BarColumn, Progress, TextColumn

    console = _console()
    text = lambda field: TextColumn(f"{{task.{field}}}", markup=False)
    fields = [text(f"fields[{name}]") for name in _no_fields]
    return Progress(
        text("description"),
        BarColumn(),
        *fields,
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
