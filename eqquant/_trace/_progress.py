import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar


_Item = TypeVar("_Item")


class Watched(Generic[_Item]):
    """Items, with a progress bar on a terminal once they have taken two seconds: which
    item it is, how fast they go, and the time that is left. A line above it says how
    long it takes in all, if that is more than a minute.

    **Arguments:**

    - `items`: what to iterate over.
    - `label`: what is done.
    - `name`: what to call an item.
    """

    def __init__(
        self,
        items: Iterable[_Item],
        label: str,
        name: Callable[[_Item], str] = lambda _: "",
    ):
        self._items = items
        self._label = label
        self._name = name
        self._total = len(items) if isinstance(items, list | tuple) else None
        self._bar: Any = None
        self._task: Any = None
        self._is_noted = False
        self._lines: list[str] = []

    def note(self, what: str) -> None:
        """Shows what else is done for an item, such as compiling. Its time then says
        nothing of the next."""
        self._is_noted = True
        self._open()
        self._bar.update(self._task, note=what, refresh=True)

    def say(self, line: str) -> None:
        """Prints a line above the bar, if there will be one."""
        self._lines.append(line)

    def __iter__(self) -> Iterator[_Item]:
        begin, usual = time.monotonic(), []
        is_told = False
        try:
            for done, item in enumerate(self._items):
                start = time.monotonic()
                if start - begin > 2:
                    self._open()
                if self._bar is not None:
                    self._show(done, item, (start - begin) / max(done, 1))
                self._is_noted = False
                yield item
                if not self._is_noted:
                    usual.append(time.monotonic() - start)
                left = None if self._total is None else self._total - done - 1
                if left and not is_told and len(usual) >= min(8, left):
                    is_told = True
                    self._tell(time.monotonic() - begin + left * _mean(usual))
        finally:
            if self._bar is not None:
                self._bar.stop()

    def _open(self):
        if self._bar is None:
            self._bar = _bar()
            self._task = self._bar.add_task(
                self._label, total=self._total, item="", note="", rate=""
            )
            self._bar.start()
        for line in self._lines:
            self._print(line)
        self._lines = []

    def _show(self, done, item, seconds):
        rate = ""
        if done:
            rate = f"{1 / seconds:.1f}/s" if seconds < 1 else f"{seconds:.1f} s each"
        name = self._name(item)
        self._bar.update(self._task, completed=done, item=name, note="", rate=rate)

    def _tell(self, seconds):
        if seconds > 60:
            self._open()
            self._print(f"{self._label} takes about {seconds / 60:.0f} minutes.")

    def _print(self, line):
        if not self._bar.disable:
            self._bar.console.print(line, markup=False, highlight=False)


def watched(
    items: Iterable[_Item], label: str, name: Callable[[_Item], str] = lambda _: ""
) -> Watched[_Item]:
    """Items that are watched while they are iterated over."""
    return Watched(items, label, name)


def _mean(numbers):
    return sum(numbers) / len(numbers)


def _console():
    from rich.console import Console

    return Console(stderr=True)


def _bar():
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    console = _console()
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[item]}"),
        TextColumn("{task.fields[note]}"),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
