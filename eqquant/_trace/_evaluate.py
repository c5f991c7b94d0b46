from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from jax import lax
from jax.extend.core import JaxprEqn, Literal

from .._implicit import opened
from ._propagate import propagate
from ._view import View


# The views of a value: none, one, or several in a concatenation.
Views: TypeAlias = tuple[View, ...]


# Maps an equation, its operands and their views to its results and their views.
Apply: TypeAlias = Callable[
    [JaxprEqn, list[Any], list[Views]], tuple[Sequence[Any], Sequence[Views]]
]


def run(
    eqn: JaxprEqn, env: dict[Any, Any], seen: dict[Any, Views], apply: Apply
) -> None:
    """Runs an equation. Adds the values of its results to `env`, and their views to
    `seen`."""
    values = [a.val if isinstance(a, Literal) else env[a] for a in eqn.invars]
    views = [() if isinstance(a, Literal) else seen.get(a, ()) for a in eqn.invars]
    outs, found = apply(eqn, values, views)
    env.update(zip(eqn.outvars, outs, strict=True))
    seen.update(zip(eqn.outvars, found, strict=True))


def evaluate(
    jaxpr: Any, values: Sequence[Any], views: Sequence[Views], apply: Apply
) -> tuple[list[Any], list[Views]]:
    """Returns the results of a program, and their views."""

    def rule(eqn, pairs):
        outs, found = apply(eqn, [a for a, _ in pairs], [b for _, b in pairs])
        return zip(outs, found, strict=True)

    operands = zip(values, views, strict=True)
    literal, constant = lambda a: (a.val, ()), lambda a: (a, ())
    results, _ = propagate(jaxpr, operands, rule, literal, constant)
    outs = [a for a, _ in results]
    for i, atom in enumerate(opened(jaxpr)[0].outvars):
        if isinstance(atom, Literal):
            aval: Any = atom.aval
            outs[i] = lax.convert_element_type(outs[i], aval.dtype)
    return outs, [b for _, b in results]
