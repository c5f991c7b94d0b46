from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from .._array import dequantize_for, is_quantized, QuantizedArray
from ._events import tell
from ._table import rules_of


# What a variable of a jaxpr stands for.
Value: TypeAlias = Any


# Of each quantized array, by its identity, which operands of `implicit` it is made of.
# (Each is kept alive, so that no other takes its identity.)
Origins: TypeAlias = dict[int, tuple[QuantizedArray, tuple[str, ...]]]


class Interpreter:
    """Evaluates one jaxpr, in which each variable stands for an array or for a
    quantized array. The rules are told which one is at work: it dequantizes for them,
    and evaluates the jaxprs that are inside of this one."""

    def __init__(self, origins: Origins):
        self._origins = origins
        self._decoded: dict[int, tuple[QuantizedArray, Array]] = {}
        self._constants: dict[Any, Any] = {}

    def evaluate(
        self, jaxpr: ClosedJaxpr | Jaxpr, values: Sequence[Value]
    ) -> list[Value]:
        """The results of a jaxpr."""
        jaxpr, constants = opened(jaxpr)
        env = dict(zip(jaxpr.constvars, constants, strict=True))
        self._constants.update(env)
        env.update(zip(jaxpr.invars, values, strict=True))
        for eqn, dead in _schedule(jaxpr):
            inputs = [_read(env, atom) for atom in eqn.invars]
            if any(map(is_quantized, inputs)):
                outputs = self._apply(eqn, inputs)
            else:
                outputs = bind(eqn, inputs)
                self._note(eqn)
            env.update(zip(eqn.outvars, outputs, strict=True))
            for var in dead:
                value = env.pop(var, None)
                if id(value) in self._decoded and all(
                    value is not other for other in env.values()
                ):
                    del self._decoded[id(value)]
        return [_as_array(atom, _read(env, atom)) for atom in jaxpr.outvars]

    def nested(
        self,
        eqn: JaxprEqn,
        jaxpr: ClosedJaxpr | Jaxpr,
        values: Sequence[Value],
        like: Sequence[Value],
        dense: Sequence[bool] | bool = True,
    ) -> list[Value]:
        """Evaluates a jaxpr inside of a transformation, where `values` stand for what
        `like` does outside. `dense` says which of the results should be dequantized."""
        for inner, outer in zip(values, like, strict=True):
            if is_quantized(inner):
                self._inherit(inner, [outer])
        inside = Interpreter(self._origins)
        outputs = inside.evaluate(jaxpr, values)
        dense = [dense] * len(outputs) if isinstance(dense, bool) else dense
        return [
            inside.dequantize(output, eqn) if is_dense else output
            for output, is_dense in zip(outputs, dense, strict=True)
        ]

    def dequantize(self, value: Value, eqn: JaxprEqn) -> Value:
        """The ordinary array, made once."""
        if not is_quantized(value):
            return value
        if id(value) not in self._decoded:
            tell("dequantize", eqn, value, self._origins_of(value))
            dense = dequantize_for(value, eqn.primitive.name)
            self._decoded[id(value)] = (value, dense)
        _, dense = self._decoded[id(value)]
        return dense

    def product(self, eqn: JaxprEqn, value: QuantizedArray) -> None:
        """Notes that a product reads the packed codes of a quantized array."""
        tell("product", eqn, value, self._origins_of(value))

    def constant(self, atom: Any) -> Any:
        """The number that an operand is, if it is the same one whenever this program
        runs, and nothing is differentiated with respect to it; or else `None`."""
        value = atom.val if isinstance(atom, Literal) else self._constants.get(atom)
        is_number = value is not None and np.ndim(value) == 0
        return value if is_number and not isinstance(value, Tracer) else None

    def _note(self, eqn):
        if eqn.primitive.name == "broadcast_in_dim":
            value = self.constant(eqn.invars[0])
            if value is not None:
                self._constants[eqn.outvars[0]] = value

    def _apply(self, eqn, inputs):
        for rule in rules_of(eqn.primitive):
            outputs = rule(self, eqn, inputs)
            if outputs is not NotImplemented:
                break
        else:
            outputs = bind(eqn, [self.dequantize(value, eqn) for value in inputs])
        sources = [value for value in inputs if is_quantized(value)]
        for output in outputs:
            if is_quantized(output):
                self._inherit(output, sources)
        return outputs

    def _origins_of(self, value):
        return self._origins[id(value)][1] if id(value) in self._origins else ()

    def _inherit(self, value, sources):
        if self._origins and id(value) not in self._origins:
            origins = [o for source in sources for o in self._origins_of(source)]
            self._origins[id(value)] = (value, tuple(dict.fromkeys(origins)))


def opened(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Any, Sequence[Any]]:
    """A jaxpr, and the constants that it has."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def bind(eqn: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    """Applies the primitive of an equation to ordinary arrays."""
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(
            *inputs, **eqn.primitive.get_bind_params(eqn.params)
        )
    return outputs if eqn.primitive.multiple_results else [outputs]


def as_arrays(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """With arrays in the place of the scalars that a jaxpr has."""
    return [
        _as_array(atom, value) for atom, value in zip(eqn.invars, values, strict=True)
    ]


def _as_array(atom: Any, value: Value) -> Value:
    if not isinstance(atom, Literal):
        return value
    aval: Any = atom.aval
    return lax.convert_element_type(value, aval.dtype)


def _read(env, atom):
    return atom.val if isinstance(atom, Literal) else env[atom]


def _schedule(jaxpr):
    # The equations that matter, and which variables are never read again after each.
    needed = {var for var in jaxpr.outvars if not isinstance(var, Literal)}
    schedule = []
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and not any(var in needed for var in eqn.outvars):
            continue
        used = {atom for atom in eqn.invars if not isinstance(atom, Literal)}
        dead = [var for var in (*used, *eqn.outvars) if var not in needed]
        needed |= used
        schedule.append((eqn, dead))
    return reversed(schedule)
