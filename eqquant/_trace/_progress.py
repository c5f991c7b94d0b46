import time
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar


_Item = TypeVar("_Item")


def watched(items: Iterable[_Item], label: str) -> Iterator[_Item]:
    """The items, with a progress bar on a terminal once they have taken two seconds."""
    total = len(items) if isinstance(items, list | tuple) else None
    start = time.monotonic()
    bar: Any = None
    task: Any = None
    try:
        for done, item in enumerate(items):
            if bar is None and time.monotonic() - start > 2:
                bar = _bar()
                task = bar.add_task(label, total=total)
                bar.start()
            if bar is not None:
                bar.update(task, completed=done)
            yield item
    finally:
        if bar is not None:
            bar.stop()


def _bar():
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
