import contextlib
import contextvars
import os
import warnings
from collections.abc import Iterator
from typing import Any


_variable = "EQQUANT_ON_DEQUANTIZE"
_muted: contextvars.ContextVar[bool] = contextvars.ContextVar("_muted", default=False)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Nothing is said: for what is traced only to see what it returns."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def policy() -> str:
    """What is to be said of a dequantization that was not asked for."""
    value = "allow" if _muted.get() else os.environ.get(_variable, "allow")
    if value not in ("allow", "warn", "raise"):
        raise ValueError(
            f"The environment variable `{_variable}` should be 'allow', 'warn' or "
            f"'raise'. Got {value!r}."
        )
    return value


def say(array: Any, nbytes: int, reason: str) -> None:
    """Says of an array that it is dequantized, and for what, if that is to be said."""
    wanted = policy()
    if wanted == "allow":
        return
    message = (
        f"{array} is dequantized, {nbytes / 1e6:.3g} MB, for {reason}. "
        f"(`{_variable}={wanted}`.)"
    )
    if wanted == "raise":
        raise RuntimeError(message)
    warnings.warn(message, stacklevel=3)
