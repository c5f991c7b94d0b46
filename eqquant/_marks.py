import pathlib
from collections.abc import Callable

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
) + (str(pathlib.Path(__file__).parent),)


def source_of(eqn: JaxprEqn) -> str:
    """The file and the line, of the user, that an equation came from."""
    traceback = eqn.source_info.traceback
    for frame in [] if traceback is None else traceback.frames:
        if not frame.file_name.startswith(_hidden):
            return f"{frame.file_name}:{frame.line_num}"
    return ""
