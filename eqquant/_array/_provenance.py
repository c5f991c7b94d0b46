import contextlib
import contextvars
import os
import pathlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import numpy as np
from jax.extend.core import JaxprEqn


# What is done to stored arrays outside of the primitive is a function of its own in the
# programs that JAX traces, by a name that `audit` looks for. XLA inlines it.
prefix = "eqquant_"


def marked(name: str, fn: Callable, static_argnums: tuple[int, ...] = ()) -> Callable:
    """A compiled function that goes by a name."""

    def call(*args):
        return fn(*args)

    call.__name__ = call.__qualname__ = prefix + name
    return jax.jit(call, static_argnums=static_argnums)


def name_of(eqn: JaxprEqn) -> str | None:
    """The name of the marked function that an equation calls, if it does."""
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    if isinstance(name, str) and name.startswith(prefix):
        return name.removeprefix(prefix)
    return None


# The directories whose frames are not the user's.
_hidden = tuple(
    str(pathlib.Path(str(module.__file__)).parent) for module in (jax, eqx, np)
) + (str(pathlib.Path(__file__).parents[1]),)


def source_of(eqn: JaxprEqn) -> str:
    """The file and the line, of the user, that an equation came from."""
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not frame.file_name.startswith(_hidden):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


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
