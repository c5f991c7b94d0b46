import functools as ft
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal
from jaxtyping import Array

from .._array import (
    dequantize_for,
    is_quantized,
    policy,
    QuantizedArray,
    source_of,
    warn_dequantized,
)
from ._program import has_jaxprs, opened, Program, program_of
from ._table import is_operand, rules_of


# The value of a variable of a jaxpr: an array, or a value for which `is_operand` of
# `_table.py` is true, such as a quantized array.
Value: TypeAlias = Any


class Interpreter:
    """Evaluates a jaxpr whose variables may be quantized arrays. Rules get the
    interpreter as an argument, to dequantize operands and to evaluate inner jaxprs."""

    def __init__(
        self,
        kept: Sequence[Value] = (),
        final: bool = False,
        given: dict[int, Any] | None = None,
    ):
        # The quantized arrays that are read after this jaxpr, and those that are read
        # after the current equation.
        self._kept = [*kept]
        self._later = [*kept]
        # Whether the results will not be differentiated.
        self.final = final
        # Replacements of constants, by their `id`.
        self._given = {} if given is None else given
        # Dense arrays by the `id` of the quantized ones. (Holding these keeps their
        # `id` from being reused.)
        self._decoded: dict[int, tuple[QuantizedArray, Array]] = {}
        self._constants: dict[Any, Any] = {}

    def evaluate(
        self, jaxpr: ClosedJaxpr | Jaxpr, values: Sequence[Value]
    ) -> list[Value]:
        """Evaluates a jaxpr, and returns its results."""
        jaxpr, constants = opened(jaxpr)
        env = dict(zip(jaxpr.constvars, self.given(constants), strict=True))
        self._constants.update(env)
        env.update(zip(jaxpr.invars, values, strict=True))
        for eqn, dead in _schedule(jaxpr):
            inputs = [_read(env, atom) for atom in eqn.invars]
            for var in dead:
                env.pop(var, None)
            if any(map(is_operand, inputs)):
                self._later = [*self._kept, *filter(is_operand, env.values())]
                outputs = self.apply(eqn, inputs)
                self._later += outputs
                self._forget(inputs)
            else:
                outputs = self.apply(eqn, inputs)
                self._note(eqn)
            new = zip(eqn.outvars, outputs, strict=True)
            env.update((var, value) for var, value in new if var not in dead)
        return [_as_array(atom, _read(env, atom)) for atom in jaxpr.outvars]

    def apply(self, eqn: JaxprEqn, inputs: Sequence[Value]) -> Sequence[Value]:
        """Evaluates an equation, and returns its results."""
        program = None
        if not self.final and policy() == "allow":
            program = program_of(eqn, inputs)
        if program is not None:
            run = ft.partial(_run, program, given=program.constants)
            outputs = self.call(run, inputs)
            program.forget()
            return outputs
        if any(map(is_operand, inputs)) or (self.final and has_jaxprs(eqn)):
            return self._apply(eqn, inputs)
        return bind(eqn, inputs)

    def call(self, fn: Callable[..., Any], values: Sequence[Value]) -> list[Value]:
        """Calls a compiled function `(wanted, values, known) -> (results, decoded)`.
        `known` are the dense arrays of values that were decoded before. `wanted` marks
        the other values whose dense arrays `decoded` should contain, if the function
        makes them."""
        known = self.decoded(values)
        # (Under a trace, request all: XLA removes unused ones, and fewer variants of
        # the function are compiled.)
        traced = any(isinstance(a, Tracer) for a in jtu.tree_leaves(values))
        wanted = tuple(
            dense is None and (traced or self.is_read_later(value))
            for value, dense in zip(values, known, strict=True)
        )
        results, decoded = fn(wanted, values, known)
        self.remember(values, decoded)
        return results

    def nested(
        self,
        eqn: JaxprEqn,
        jaxpr: ClosedJaxpr | Jaxpr,
        values: Sequence[Value],
        dense: Sequence[bool] | bool = True,
    ) -> list[Value]:
        """Evaluates a jaxpr inside a transformation. `dense` marks the results to
        dequantize."""
        inside = Interpreter(final=self.final, given=self._given)
        outputs = inside.evaluate(jaxpr, values)
        dense = [dense] * len(outputs) if isinstance(dense, bool) else dense
        return [
            inside.dequantize(output, eqn) if is_dense else output
            for output, is_dense in zip(outputs, dense, strict=True)
        ]

    def dequantize(self, value: Value, eqn: JaxprEqn) -> Value:
        """Returns the dense array of a value, which is decoded only once."""
        if not is_operand(value):
            return value
        if not is_quantized(value):
            return value.dequantize()
        if id(value) not in self._decoded:
            name = eqn.primitive.name
            if policy() != "allow":
                source = source_of(eqn)
                where = f" at {source}" if source else ""
                nbytes = value.size * value.dtype.itemsize
                warn_dequantized(value, nbytes, f"the primitive `{name}`{where}")
            self._decoded[id(value)] = (value, dequantize_for(value, name))
        _, dense = self._decoded[id(value)]
        return dense

    def inline(
        self, jaxpr: ClosedJaxpr | Jaxpr, values: Sequence[Value]
    ) -> list[Value]:
        """Evaluates a jaxpr as if its equations were part of this one."""
        kept = [*filter(self.is_read_later, values)]
        inside = Interpreter(kept, self.final, self._given)
        inside._decoded = self._decoded
        return inside.evaluate(jaxpr, values)

    def decoded(self, values: Sequence[Value]) -> list[Array | None]:
        """Returns the dense array of each value that was decoded, `None` for the
        others."""
        pairs = [self._decoded.get(id(value)) for value in values]
        return [None if pair is None else pair[1] for pair in pairs]

    def remember(
        self, values: Sequence[Value], decoded: Sequence[Array | None]
    ) -> None:
        """Records the dense arrays of values, where they are not `None`."""
        for value, dense in zip(values, decoded, strict=True):
            if dense is not None:
                self._decoded[id(value)] = (value, dense)

    def is_read_later(self, value: Value) -> bool:
        """Whether anything after the current equation reads this quantized array."""
        return any(value is other for other in self._later)

    def constant(self, atom: Any) -> Any:
        """Returns the scalar value of an operand, if it is a constant of the program
        that is not differentiated. `None` otherwise."""
        value = atom.val if isinstance(atom, Literal) else self._constants.get(atom)
        is_number = value is not None and np.ndim(value) == 0
        return value if is_number and not isinstance(value, Tracer) else None

    def given(self, constants: Sequence[Any]) -> list[Any]:
        """Returns the constants of a jaxpr, or their replacements."""
        return [self._given.get(id(constant), constant) for constant in constants]

    def _note(self, eqn):
        if eqn.primitive.name == "broadcast_in_dim":
            value = self.constant(eqn.invars[0])
            if value is not None:
                self._constants[eqn.outvars[0]] = value

    def _apply(self, eqn, inputs):
        kinds = {type(value) for value in inputs if is_operand(value)}
        if len(kinds) > 1 and not has_jaxprs(eqn):
            # Rules are for operands of one class, so other operands are dequantized.
            inputs = [
                self.dequantize(value, eqn) if is_quantized(value) else value
                for value in inputs
            ]
        for rule in rules_of(eqn, inputs):
            outputs = rule(self, eqn, inputs)
            if outputs is not NotImplemented:
                break
        else:
            outputs = bind(eqn, [self.dequantize(value, eqn) for value in inputs])
        return outputs

    def _forget(self, values):
        for value in values:
            if not self.is_read_later(value):
                self._decoded.pop(id(value), None)


def inside(
    wanted: Sequence[bool],
    values: Sequence[Value],
    known: Sequence[Array | None],
    evaluate: Callable[[Interpreter], list[Value]],
    final: bool,
    given: dict[int, Any],
) -> tuple[list[Value], list[Array | None]]:
    """Runs the body of a function for `Interpreter.call`: `evaluate` within a new
    interpreter."""
    kept = [v for v, is_wanted in zip(values, wanted) if is_wanted]
    interpreter = Interpreter(kept, final, given)
    interpreter.remember(values, known)
    results = evaluate(interpreter)
    decoded = zip(interpreter.decoded(values), wanted)
    return results, [dense if is_wanted else None for dense, is_wanted in decoded]


@ft.partial(jax.jit, static_argnums=(0, 1))
def _run(program: Program, wanted, values, known, given):
    eqn = program.eqn
    assert eqn is not None
    tracers = {id(a): new for a, new in zip(program.constants, given, strict=True)}
    run = lambda interpreter: list(interpreter.apply(eqn, values))
    return inside(wanted, values, known, run, True, tracers)


def bind(eqn: JaxprEqn, inputs: Sequence[Any]) -> Sequence[Any]:
    """Applies the primitive of an equation to dense arrays."""
    with eqn.ctx.manager:
        outputs = eqn.primitive.bind(
            *inputs, **eqn.primitive.get_bind_params(eqn.params)
        )
    return [*outputs] if eqn.primitive.multiple_results else [outputs]


def as_arrays(eqn: JaxprEqn, values: Sequence[Value]) -> list[Value]:
    """Returns the operands of an equation, with its scalar literals as arrays."""
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
    # The equations that the results depend on, each with the variables that are not
    # read after it.
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
