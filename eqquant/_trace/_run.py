from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

from jax import lax
from jax.extend.core import JaxprEqn, Literal

from .._implicit import opened
from ._view import View


# The views of a value: none, one, or several in a concatenation.
Views: TypeAlias = tuple[View, ...]


# Maps an equation, its operands and their views to its results and their views.
Apply: TypeAlias = Callable[
    [JaxprEqn, list[Any], list[Views]], tuple[Sequence[Any], Sequence[Views]]
]


def run(
    eqns: Iterable[JaxprEqn], env: dict[Any, Any], seen: dict[Any, Views], apply: Apply
) -> None:
    """Runs equations. Adds the values of their variables to `env`, and their views to
    `seen`."""
    for eqn in eqns:
        values = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
        views = [() if isinstance(a, Literal) else seen.get(a, ()) for a in eqn.invars]
        outs, found = apply(eqn, values, views)
        env.update(zip(eqn.outvars, outs, strict=True))
        seen.update(zip(eqn.outvars, found, strict=True))


def evaluate(
    jaxpr: Any, values: Sequence[Any], views: Sequence[Views], apply: Apply
) -> tuple[list[Any], list[Views]]:
    """Returns the results of a program, and their views."""
    jaxpr, constants = opened(jaxpr)
    env = dict(zip(jaxpr.constvars, constants, strict=True))
    env.update(zip(jaxpr.invars, values, strict=True))
    seen = dict(zip(jaxpr.invars, views, strict=True))
    run(jaxpr.eqns, env, seen, apply)
    outs, found = [], []
    for a in jaxpr.outvars:
        if isinstance(a, Literal):
            aval: Any = a.aval
            outs.append(lax.convert_element_type(a.val, aval.dtype))
            found.append(())
        else:
            outs.append(env[a])
            found.append(seen.get(a, ()))
    return outs, found
