import math
import time
from collections.abc import Iterator, Sequence

from ._decide import Decision


def with_progress(decisions: Sequence[Decision]) -> Iterator[Decision]:
    """Iterates, with a progress bar once that has taken two seconds."""
    sizes = [math.prod(d.info.shape) if d.info and d.format else 0 for d in decisions]
    start, done = time.monotonic(), 0
    bar = task = None
    for decision, size in zip(decisions, sizes):
        yield decision
        done += size
        if bar is None and time.monotonic() - start > 2:
            bar = _bar()
            task = bar.add_task("Quantizing", total=sum(sizes))
            bar.start()
        if bar is not None and task is not None:
            bar.update(task, completed=done)
    if bar is not None:
        bar.stop()


def _bar():
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
