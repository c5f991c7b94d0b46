import contextlib
import contextvars
import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

from jax.extend.core import JaxprEqn

from .._array import QuantizedArray
from .._loud import policy, say
from .._marks import source_of


class Event(NamedTuple):
    """Something that became of a quantized operand, told of when it is traced.

    - `kind`: `"product"` if packed codes were read by a product; `"dequantize"` if the
        whole array was dequantized, since there is no rule.
    - `primitive`: the name of the primitive that it was an operand of.
    - `operand`: the quantized array; a tracer, perhaps, or of tracers.
    - `origins`: which of the operands of `implicit` it was made of, as paths of them.
    - `nbytes`: how much memory the ordinary array takes.
    - `source`: the file and the line, of the user, that the primitive came from.
    """

    kind: Literal["product", "dequantize"]
    primitive: str
    operand: QuantizedArray
    origins: tuple[str, ...]
    nbytes: int
    source: str


Observer = Callable[[Event], None]

_observer: contextvars.ContextVar[Observer | None] = contextvars.ContextVar(
    "_observer", default=None
)
_muted: contextvars.ContextVar[bool] = contextvars.ContextVar("_muted", default=False)


@contextlib.contextmanager
def observing(callback: Observer) -> Iterator[None]:
    """Calls `callback` with an [`Event`][] for each product and each dequantization
    that `implicit` traces in this context. What was traced and compiled before is not
    traced again."""
    token = _observer.set(callback)
    try:
        yield
    finally:
        _observer.reset(token)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Tells of nothing: for what is traced only to see what it returns."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def observer() -> Observer | None:
    return None if _muted.get() else _observer.get()


def tell(
    kind: Literal["product", "dequantize"],
    eqn: JaxprEqn,
    operand: QuantizedArray,
    origins: tuple[str, ...],
) -> None:
    """Tells the observer, if there is one; and of a dequantization, warns or raises an
    error if that is asked for."""
    loud = kind == "dequantize" and policy() != "allow"
    callback = observer()
    if _muted.get() or (callback is None and not loud):
        return
    nbytes = math.prod(operand.shape) * operand.dtype.itemsize
    name = eqn.primitive.name
    event = Event(kind, name, operand, origins, nbytes, source_of(eqn))
    if callback is not None:
        callback(event)
    if loud:
        where = f" at {event.source}" if event.source else ""
        say(operand, nbytes, f"the primitive `{name}`{where}")
