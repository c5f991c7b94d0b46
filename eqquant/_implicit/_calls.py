import functools as ft
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.extend.core import JaxprEqn, Literal

from .._array import AbstractArrayLike, is_quantized, policy
from ._interpreter import as_arrays, bind, inside, Interpreter, Value
from ._program import constants_of, is_placed
from ._table import add_rule, is_operand
from ._trace import trace


# Rules for inner functions. These stay functions, with their custom derivatives.


# (Hints, and layouts in memory, change no numbers.)
@add_rule(
    "jit",
    of=AbstractArrayLike,
    takes="jaxpr name in_shardings out_shardings in_layouts out_layouts ctx_mesh "
    "donated_invars keep_unused inline",
    compiler_options_kvs=(),
)
def _jit(interpreter, eqn, values):
    values = as_arrays(eqn, values)
    if is_placed(eqn):
        return NotImplemented
    given = interpreter.given(constants_of(eqn.params["jaxpr"]))
    jaxpr, final = eqn.params["jaxpr"], interpreter.final
    run = ft.partial(_compiled(jaxpr), policy(), final, given=given)
    with jax.named_scope(eqn.params["name"]), eqn.ctx.manager:
        return interpreter.call(run, values)


# Holds one jitted function per jaxpr, so that each is traced and compiled once for the
# same types of operands. An entry lives as long as its jaxpr.
_functions: weakref.WeakKeyDictionary[Any, Callable] = weakref.WeakKeyDictionary()


def _compiled(jaxpr):
    if jaxpr not in _functions:
        _functions[jaxpr] = _evaluating(weakref.ref(jaxpr))
    return _functions[jaxpr]


def _evaluating(reference):
    @ft.partial(jax.jit, static_argnums=(0, 1, 2))
    def _jitted(policy, final, wanted, values, known, given):
        del policy
        jaxpr = reference()
        constants = constants_of(jaxpr)
        tracers = {id(a): new for a, new in zip(constants, given, strict=True)}
        evaluate = lambda interpreter: interpreter.evaluate(jaxpr, values)
        return inside(wanted, values, known, evaluate, final, tracers)

    return _jitted


@add_rule("closed_call", of=AbstractArrayLike, takes="call_jaxpr")
def _call(interpreter, eqn, values):
    return interpreter.inline(eqn.params["call_jaxpr"], values)


@add_rule(
    "remat2",
    of=AbstractArrayLike,
    takes="jaxpr prevent_cse differentiated policy",
)
def _checkpoint(interpreter, eqn, values):
    values = as_arrays(eqn, values)
    differentiated = eqn.params["differentiated"]
    if interpreter.final and not differentiated:
        return interpreter.inline(eqn.params["jaxpr"], values)

    def call(new):
        return interpreter.nested(eqn, eqn.params["jaxpr"], new, dense=False)

    policy = None if interpreter.final else eqn.params["policy"]
    fn = jax.checkpoint(call, prevent_cse=eqn.params["prevent_cse"], policy=policy)
    if not differentiated:
        return fn(values)
    # This is part of a derivative already: set `differentiated` in the new equation,
    # too, so that XLA does not merge it with the computation that it repeats.
    jaxpr, out = jax.make_jaxpr(fn, return_shape=True)(values)
    leaves = jtu.tree_leaves(values)
    env = dict(zip(jaxpr.jaxpr.constvars, jaxpr.consts, strict=True))
    env.update(zip(jaxpr.jaxpr.invars, leaves, strict=True))
    (inner,) = jaxpr.jaxpr.eqns
    inputs = [a.val if isinstance(a, Literal) else env[a] for a in inner.invars]
    params = inner.params | {"differentiated": True}
    env.update(zip(inner.outvars, bind(inner.replace(params=params), inputs)))
    found = [a.val if isinstance(a, Literal) else env[a] for a in jaxpr.jaxpr.outvars]
    return jtu.tree_unflatten(jtu.tree_structure(out), found)


# (Derivatives bind the primitive with all of these parameters.)
@add_rule(
    "custom_jvp_call",
    of=AbstractArrayLike,
    takes="call_jaxpr num_consts jvp_jaxpr_fun symbolic_zeros",
)
def _custom_jvp(interpreter, eqn, values):
    values = _without_trained(interpreter, eqn, as_arrays(eqn, values))
    places = _differentiable(eqn, values)
    if interpreter.final or not places:
        return interpreter.inline(eqn.params["call_jaxpr"], values)

    @jax.custom_jvp
    def call(values):
        return interpreter.nested(eqn, eqn.params["call_jaxpr"], values)

    later = Interpreter()  # The replaced constants of this one will be gone by then.

    @call.defjvp
    def jvp(primals, tangents):
        (values,), (tangents,) = primals, tangents
        tangents = [tangents[i] for i in places]

        def fn(*operands):
            number = len(values)
            some, dots = list(operands[:number]), list(operands[number:])
            new, out = jax.jvp(_of(eqn, some, places), [some[i] for i in places], dots)
            return new, [y for y in out if y.dtype != jax.dtypes.float0]

        jaxpr = trace(fn, [*values, *tangents])
        results = later.nested(eqn, jaxpr, [*values, *tangents])
        y, rest = results[: len(eqn.outvars)], iter(results[len(eqn.outvars) :])
        return y, [next(rest) if _inexact(a) else _float0(a.shape) for a in y]

    return call(values)


@add_rule(
    "custom_vjp_call",
    of=AbstractArrayLike,
    takes="call_jaxpr num_consts fwd_jaxpr_thunk bwd out_trees symbolic_zeros",
)
def _custom_vjp(interpreter, eqn, values):
    values = _without_trained(interpreter, eqn, as_arrays(eqn, values))
    places = _differentiable(eqn, values)
    if interpreter.final or not places:
        return interpreter.inline(eqn.params["call_jaxpr"], values)
    vjp_tree: Any = None

    @jax.custom_vjp
    def call(values):
        return interpreter.nested(eqn, eqn.params["call_jaxpr"], values)

    later = Interpreter()  # The replaced constants of this one will be gone by then.

    def forward(values):
        def fn(*operands):
            nonlocal vjp_tree
            some = [operands[i] for i in places]
            y, vjp = jax.vjp(lambda *some: _of(eqn, operands, places)(*some), *some)
            residuals, vjp_tree = jtu.tree_flatten(vjp)
            return y, residuals

        # Quantized arrays among the residuals stay packed.
        number = len(eqn.outvars)
        jaxpr = trace(fn, values)
        dense = [i < number for i in range(len(jaxpr.out_avals))]
        results = later.nested(eqn, jaxpr, values, dense)
        return results[:number], (results[number:], [None if q else 0 for q in dense])

    def backward(residuals, cotangents):
        residuals, _ = residuals
        some = [ct for ct in cotangents if ct.dtype != jax.dtypes.float0]

        def fn(*operands):
            vjp = vjp_tree.unflatten(operands[: len(residuals)])
            rest = iter(operands[len(residuals) :])
            return vjp([next(rest) if _inexact(ct) else ct for ct in cotangents])

        operands = [*residuals, *some]
        found = later.nested(eqn, trace(fn, operands), operands)
        out: list[Any] = [None] * len(like)
        for i, ct in zip(places, found, strict=True):
            out[i] = ct
        return (out,)

    call.defvjp(forward, backward)
    like = values
    return call(values)


def _without_trained(interpreter, eqn, values):
    # A custom derivative sees ordinary arrays in the place of operands that it
    # differentiates.
    if interpreter.final:
        return values
    trains = lambda x: is_operand(x) and not is_quantized(x)
    return [interpreter.dequantize(x, eqn) if trains(x) else x for x in values]


def _of(eqn, values: Sequence[Any], places: Sequence[int]) -> Callable:
    # Returns the primitive as a function of some operands, with the others fixed.
    def fn(*some):
        new = list(values)
        for i, value in zip(places, some, strict=True):
            new[i] = value
        return bind(eqn, new)

    return fn


def _differentiable(eqn: JaxprEqn, values: Sequence[Value]) -> list[int]:
    return [
        i
        for i, (atom, value) in enumerate(zip(eqn.invars, values, strict=True))
        if not (isinstance(atom, Literal) or is_quantized(value)) and _inexact(value)
    ]


def _inexact(value: Any) -> bool:
    return jnp.issubdtype(value.dtype, jnp.inexact)


def _float0(shape):
    return np.zeros(shape, jax.dtypes.float0)
