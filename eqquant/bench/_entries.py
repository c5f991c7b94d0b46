import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from ._candidate import Candidate, dense, quantized
from ._formats import Quantization
from ._peers import installed_peers


_T = TypeVar("_T")


class Failure(NamedTuple):
    """The message of an exception that another library raised."""

    message: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """A product to measure.

    - `name`: the name in tables.
    - `make`: makes a candidate of a weight.
    - `foreign`: whether it is a product of another library.
    """

    name: str
    make: Callable[[Float[np.ndarray, "k n"]], Candidate]
    foreign: bool = False

    def attempt(self, fn: Callable[[], _T]) -> _T | Failure:
        """Calls a function. An exception of another library becomes a `Failure`, and
        does not stop the bench."""
        if not self.foreign:
            return fn()
        try:
            return fn()
        except Exception as e:
            first, *_ = f"{type(e).__name__}: {e}".splitlines()
            return Failure(first)


def entries(wanted: Sequence[Quantization], peers: bool) -> list[Entry]:
    """Returns all products to measure, beginning with float32."""
    return [
        Entry("float32", lambda w: dense(jnp.float32, w)),
        Entry("bfloat16", lambda w: dense(jnp.bfloat16, w)),
        *[Entry(str(q), lambda w, q=q: quantized(q, w)) for q in wanted],
        *[
            Entry(peer.name, peer.make, foreign=True)
            for peer in (installed_peers() if peers else [])
        ],
    ]


# Called with the fraction of the work that is done, and a description of the current
# step.
Show: TypeAlias = Callable[[float, str], Any]


@contextlib.contextmanager
def progress_bar(console: Console) -> Iterator[Show]:
    """Shows a progress bar, if the console is a terminal, and yields the function that
    updates it."""
    with Progress(
        BarColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}", markup=False),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda done, doing: progress.update(
            task, completed=done, description=doing
        )


class Meter:
    """Adds up the work that is done, and shows it."""

    def __init__(self, total: float | int, show: Show | None):
        self._total = total
        self._done = 0
        self._show = show

    def add(self, amount: float | int, doing: str) -> None:
        self._done += amount
        if self._show is not None:
            self._show(min(1, self._done / self._total), doing)
