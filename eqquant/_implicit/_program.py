from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import eval_context, Tracer
from jax.extend.core import (
    ClosedJaxpr,
    get_opaque_trace_state,
    Jaxpr,
    JaxprEqn,
    Literal,
)
from jax.extend.linear_util import WrappedFun
from jax.sharding import AbstractMesh, Mesh

from ._table import rules_of


# In a function that is not jitted, loops, branches and inner functions are compiled,
# each as one program. Its jaxprs are traced anew in each call, so programs are compared
# by the content of their jaxprs, and equal ones are compiled once. The cache keeps
# neither the jaxprs nor their constants, which are passed to the program as operands.


class Program:
    """An equation with inner jaxprs, as the static argument of a compiled function. It
    equals any program with the same content. It holds the equation only until it is
    traced.
    """

    def __init__(self, eqn: JaxprEqn, key: Hashable, constants: list[Any]):
        self.eqn: JaxprEqn | None = eqn
        self.constants: list[Any] = constants
        self._key = key
        self._hash = hash(key)

    def __hash__(self):
        return self._hash

    def __eq__(self, other):
        return isinstance(other, Program) and self._key == other._key

    def forget(self) -> None:
        self.eqn = None
        self.constants = []


def program_of(eqn: JaxprEqn, values: Sequence[Any]) -> Program | None:
    """Returns the program of an equation, if it has inner jaxprs and no operand is
    traced."""
    if not has_jaxprs(eqn) or not rules_of(eqn):
        return None
    constants = constants_of(*_jaxprs(eqn))
    known = not any(isinstance(a, Tracer) for a in [*values, *constants])
    if not known or get_opaque_trace_state() != _not_traced:
        return None
    places = {id(constant): i for i, constant in enumerate(constants)}
    try:
        atoms = [(isinstance(a, Literal), a.aval) for a in eqn.invars]
        return Program(eqn, (*atoms, *_key_of_eqn(eqn, places)), constants)
    # (Only `hash` can tell whether the parameters of a primitive are hashable.)
    except (TypeError, _NoKey):
        return None


with eval_context():
    _not_traced = get_opaque_trace_state()


def has_jaxprs(eqn: JaxprEqn) -> bool:
    return any(True for _ in _jaxprs(eqn))


def opened(jaxpr: ClosedJaxpr | Jaxpr) -> tuple[Any, Sequence[Any]]:
    """Returns a jaxpr without its constants, and the constants."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr.jaxpr, jaxpr.consts
    return jaxpr, ()


def constants_of(*jaxprs: ClosedJaxpr | Jaxpr) -> list[Any]:
    """Returns the arrays that are constants of some jaxprs or of their inner jaxprs.
    Scalars are left out, since rules may depend on their values."""
    found: dict[int, Any] = {}
    for jaxpr in jaxprs:
        jaxpr, constants = opened(jaxpr)
        inner = [a for eqn in jaxpr.eqns for a in constants_of(*_jaxprs(eqn))]
        found.update((id(a), a) for a in constants if not _is_number(a))
        found.update((id(a), a) for a in inner)
    return list(found.values())


def _jaxprs(eqn):
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            if isinstance(item, Jaxpr | ClosedJaxpr):
                yield item


class _NoKey(Exception):
    """A jaxpr contains a function, which cannot be compared by its content."""


# Parameters that matter only for derivatives, which programs do not have.
_of_derivatives = {
    "custom_jvp_call": ("jvp_jaxpr_fun", "jvp_jaxpr_thunk"),
    "custom_vjp_call": ("fwd_jaxpr_thunk", "bwd", "out_trees", "symbolic_zeros"),
    "remat2": ("policy",),
}


def _key_of_eqn(eqn, places):
    name = eqn.primitive.name
    if has_jaxprs(eqn) and places:
        # Otherwise the constants would become part of the program.
        given = rules_of(eqn) and not (name == "jit" and is_placed(eqn))
        if not given and constants_of(*_jaxprs(eqn)):
            raise _NoKey
    params = [
        (key, _key(value, places))
        for key, value in sorted(eqn.params.items())
        if key not in _of_derivatives.get(name, ())
    ]
    outs = [var.aval for var in eqn.outvars]
    return eqn.primitive, eqn.ctx, tuple(outs), tuple(params)


def _key_of_jaxpr(jaxpr, places):
    jaxpr, constants = opened(jaxpr)
    numbers = {}

    def new(var):
        numbers[var] = len(numbers)
        return var.aval

    def atom(a):
        return _key(a.val, places) + (a.aval,) if isinstance(a, Literal) else numbers[a]

    key: list[Any] = [len(jaxpr.constvars), len(jaxpr.invars)]
    key += [_key(constant, places) for constant in constants]
    key += [new(var) for var in (*jaxpr.constvars, *jaxpr.invars)]
    for eqn in jaxpr.eqns:
        key.append(tuple(map(atom, eqn.invars)))
        key.append(_key_of_eqn(eqn, places))
        for var in eqn.outvars:
            new(var)
    return (*key, *map(atom, jaxpr.outvars))


def _key(x, places):
    if isinstance(x, Jaxpr | ClosedJaxpr):
        return _key_of_jaxpr(x, places)
    if type(x) in (tuple, list):
        return tuple(_key(item, places) for item in x)
    if type(x) is dict:
        return tuple((key, _key(value, places)) for key, value in x.items())
    if id(x) in places:
        return "constant", places[id(x)], jax.typeof(x)
    if isinstance(x, jax.Array | np.ndarray | np.generic | int | float | complex):
        x = np.asarray(x)
        return x.dtype, x.shape, x.tobytes()
    function = callable(x) and not isinstance(x, type | Mesh | AbstractMesh)
    if function or isinstance(x, WrappedFun):
        raise _NoKey
    return (x,)


def _is_number(x):
    return np.ndim(x) == 0 and not jnp.issubdtype(x.dtype, jax.dtypes.extended)


def is_placed(eqn: JaxprEqn) -> bool:
    """Whether a `jit` specifies shardings of its operands or results."""
    shardings = [*eqn.params["in_shardings"], *eqn.params["out_shardings"]]
    return any(isinstance(s, jax.sharding.Sharding) for s in shardings)
