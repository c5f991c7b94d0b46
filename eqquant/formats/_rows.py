import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

from jaxtyping import Array, Float

from ._base import AbstractFormat, Stored


def of_all_rows(x: Float[Array, "*b n _ _"]) -> Float[Array, "*b _ _ _"]:
    """What belongs to each row of a matrix, before a format reduces it over them: in
    [`encode_rows`][], of the rows that are elsewhere, too."""
    return _others.get()(x)


def encode_rows(
    format: AbstractFormat, w: Float[Array, "n k"], known: Sequence[Array] = ()
) -> tuple[Stored, list[Array]]:
    """As `format.encode`, of some rows of a matrix that is larger.

    **Arguments:**

    - `known`: what `of_all_rows` is to return to the format, call by call. After these,
        it returns what it is given.

    **Returns:**

    The stored arrays; and what `of_all_rows` was given, call by call. What it is given
    first of each of the rows is known of all of them, then, and so on. Once all is
    known, the stored arrays are the rows of those of the matrix.
    """
    asked = []

    def others(x):
        asked.append(x)
        return known[len(asked) - 1] if len(asked) <= len(known) else x

    with _answering(others):
        return format.encode(w), asked


_others: contextvars.ContextVar[Callable[[Array], Array]] = contextvars.ContextVar(
    "_others", default=lambda x: x
)


@contextlib.contextmanager
def _answering(others: Callable[[Array], Array]) -> Iterator[None]:
    token = _others.set(others)
    try:
        yield
    finally:
        _others.reset(token)
