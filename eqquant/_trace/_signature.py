from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var

from .._implicit import opened


class Signature:
    """Names equations. Equations that compute the same have the same name.

    - `inputs`: the variables that no equation so far computes, in order.
    - `numbers`: a number for each variable.
    """

    def __init__(self, marked: Collection[int]):
        """`marked` are the `id`s of equations to distinguish from others."""
        self.inputs: list[Var] = []
        self.numbers: dict[Var, int] = {}
        self._marked = marked

    def of(self, eqns: Sequence[JaxprEqn]) -> Hashable:
        """Returns the name of some equations, which follow the equations before."""
        return tuple(map(self._equation, eqns))

    def _equation(self, eqn):
        operands = tuple(map(self._operand, eqn.invars))
        params = tuple((k, self._value(v)) for k, v in sorted(eqn.params.items()))
        results = tuple(self._number(v) for v in eqn.outvars)
        kinds = tuple(v.aval for v in eqn.outvars)
        marked = id(eqn) in self._marked
        return eqn.primitive, params, operands, results, kinds, marked

    def _number(self, var):
        return self.numbers.setdefault(var, len(self.numbers))

    def _operand(self, atom):
        if isinstance(atom, Literal):
            return atom.aval, np.asarray(atom.val).tobytes()
        if atom not in self.numbers:
            self.inputs.append(atom)
        return self._number(atom)

    def _value(self, value: Any) -> Hashable:
        if isinstance(value, ClosedJaxpr | Jaxpr):
            jaxpr, constants = opened(value)
            inner = Signature(self._marked)
            operands = [*jaxpr.constvars, *jaxpr.invars]
            avals = tuple(v.aval for v in operands)
            inner.numbers = {v: i for i, v in enumerate(operands)}
            eqns, outs = inner.of(jaxpr.eqns), map(inner._operand, jaxpr.outvars)
            # (Constants live as long as the program does.)
            return avals, eqns, tuple(outs), tuple(map(id, constants))
        if isinstance(value, tuple | list):
            return tuple(map(self._value, value))
        return value if isinstance(value, Hashable) else id(value)
