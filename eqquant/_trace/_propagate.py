from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._implicit import opened


_Value = TypeVar("_Value")


def propagate(
    jaxpr: ClosedJaxpr | Jaxpr,
    operands: Iterable[_Value],
    rule: Callable[[JaxprEqn, list[_Value]], Iterable[_Value]],
    literal: Callable[[Literal], _Value],
    constant: Callable[[Any], _Value],
) -> tuple[list[_Value], dict[Var, _Value]]:
    """Propagates values of any kind through a program, one equation after another.
    Returns the values of the results, and the value of each variable.

    - `jaxpr`, `operands`: the program, and the value of each of its operands.
    - `rule`: maps an equation and the values of its operands to the values of its
        results.
    - `literal`, `constant`: map a literal or a constant of the program to its value.
    """
    jaxpr, constants = opened(jaxpr)
    known = dict(zip(jaxpr.constvars, map(constant, constants), strict=True))
    known.update(zip(jaxpr.invars, operands, strict=True))
    read = lambda atom: literal(atom) if isinstance(atom, Literal) else known[atom]
    for eqn in jaxpr.eqns:
        values = [read(atom) for atom in eqn.invars]
        known.update(zip(eqn.outvars, rule(eqn, values), strict=True))
    return [read(atom) for atom in jaxpr.outvars], known
