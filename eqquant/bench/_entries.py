import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias, TypeVar

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float

from ._candidate import Candidate, dense, quantized
from ._formats import Quantization
from ._peers import installed_peers


_T = TypeVar("_T")


class Failure(NamedTuple):
    """What another library raised."""

    message: str


@dataclasses.dataclass(frozen=True)
class Entry:
    """Something to be measured.

    - `name`: as it is printed.
    - `make`: from a weight to a candidate.
    - `foreign`: whether it is of another library.
    """

    name: str
    make: Callable[[Float[np.ndarray, "k n"]], Candidate]
    foreign: bool = False

    def attempt(self, fn: Callable[[], _T]) -> _T | Failure:
        """Calls a function. What another library raises does not stop the others."""
        if not self.foreign:
            return fn()
        try:
            return fn()
        except Exception as e:
            first, *_ = f"{type(e).__name__}: {e}".splitlines()
            return Failure(first)


def entries(wanted: Sequence[Quantization], peers: bool) -> list[Entry]:
    """Everything that is to be measured, that of float32 first."""
    return [
        Entry("float32", lambda w: dense(jnp.float32, w)),
        Entry("bfloat16", lambda w: dense(jnp.bfloat16, w)),
        *[Entry(str(q), lambda w, q=q: quantized(q, w)) for q in wanted],
        *[
            Entry(peer.name, peer.make, foreign=True)
            for peer in (installed_peers() if peers else [])
        ],
    ]


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
