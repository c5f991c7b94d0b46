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


# Outside of the primitive, only functions that are jitted under a name with this prefix
# read stored arrays. `audit` looks for the name in jaxprs; XLA inlines the function.
prefix = "eqquant_"


def marked(name: str, fn: Callable, static_argnums: tuple[int, ...] = ()) -> Callable:
    """Jits `fn` under a name that [`name_of`][] finds in jaxprs."""

    def call(*args):
        return fn(*args)

    call.__name__ = call.__qualname__ = prefix + name
    return jax.jit(call, static_argnums=static_argnums)


def name_of(eqn: JaxprEqn) -> str | None:
    """Returns the name of the marked function that an equation calls, or `None`."""
    name = eqn.params.get("name") if eqn.primitive.name in ("jit", "pjit") else None
    if isinstance(name, str) and name.startswith(prefix):
        return name.removeprefix(prefix)
    return None


# Frames from these directories do not belong to the user.
_hidden = tuple(
    str(pathlib.Path(str(module.__file__)).parent) for module in (jax, eqx, np)
) + (str(pathlib.Path(__file__).parents[1]),)


def source_of(eqn: JaxprEqn) -> str:
    """Returns the line of the user's code that an equation was traced from, as
    `file:line`."""
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not frame.file_name.startswith(_hidden):
            return f"{frame.file_name}:{frame.line_num}"
    return ""


_variable = "EQQUANT_ON_DEQUANTIZE"
_muted: contextvars.ContextVar[bool] = contextvars.ContextVar("_muted", default=False)


@contextlib.contextmanager
def muted() -> Iterator[None]:
    """Silences dequantization warnings, as during shape inference."""
    token = _muted.set(True)
    try:
        yield
    finally:
        _muted.reset(token)


def policy() -> str:
    """Returns the policy for implicit dequantization: `"allow"`, `"warn"` or `"raise"`.
    Raises a `ValueError` if the environment variable has another value."""
    value = "allow" if _muted.get() else os.environ.get(_variable, "allow")
    if value not in ("allow", "warn", "raise"):
        raise ValueError(
            f"The environment variable `{_variable}` should be 'allow', 'warn' or "
            f"'raise'. Got {value!r}."
        )
    return value


def warn_dequantized(array: Any, nbytes: int, reason: str) -> None:
    """Warns or raises, according to the policy, of an operation named `reason` that
    dequantizes `array` to this number of bytes."""
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
