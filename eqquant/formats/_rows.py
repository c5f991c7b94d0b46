import contextlib
import contextvars
from collections.abc import Callable, Iterator, Sequence

from jaxtyping import Array, Float

from ._base import AbstractFormat, Stored


def of_all_rows(x: Float[Array, "*b n _ _"]) -> Float[Array, "*b _ _ _"]:
    """Formats call this on per-row values before they reduce them over the rows of a
    matrix. In `encode_rows`, it returns the values of all rows, including rows that are
    not available."""
    return _others.get()(x)


def encode_rows(
    format: AbstractFormat, w: Float[Array, "n k"], known: Sequence[Array] = ()
) -> tuple[Stored, list[Array]]:
    """Encodes some rows of a larger matrix, like `format.encode` of the whole.

    **Arguments:**

    - `known`: holds, per reduction, the values gathered from all rows. `of_all_rows`
        returns them, call by call; in further calls it returns its argument.

    **Returns:**

    The stored arrays, and the arguments of `of_all_rows`, call by call. Repeat this for
    all groups of rows, each time with one more reduction gathered into `known`. Once
    all are known, the stored arrays are rows of the stored arrays of the whole matrix.
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
