from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import JaxprEqn

from .._array import AbstractArrayLike, muted
from .._product import as_tuple
from ._interpreter import as_arrays, Interpreter, Value
from ._program import opened
from ._table import add_rule, is_operand


# Rules for loops and branches. Quantized operands stay packed; a carried value stays
# packed if the body returns it with the same format and shape.


@add_rule(
    "scan",
    of=AbstractArrayLike,
    # (JAX up to 0.10 has `num_consts` and `num_carry`, and later versions `ft_*`.)
    takes="jaxpr length reverse unroll num_consts num_carry ft_in ft_out",
)
def _scan(interpreter, eqn, values):
    params = eqn.params
    consts, number = sizes_of_scan(eqn)
    values = as_arrays(eqn, values)
    constants, carry = values[:consts], values[consts : consts + number]
    stacks = [
        interpreter.dequantize(x, eqn) if is_operand(x) and not _is_stack(x) else x
        for x in values[consts + number :]
    ]

    def step(carry, xs, dense):
        new = [*constants, *carry, *xs]
        dense = dense + [False] * (len(eqn.outvars) - number)
        results = interpreter.nested(eqn, params["jaxpr"], new, dense)
        return results[:number], results[number:]

    def once(carry, dense):
        xs = jtu.tree_map(lambda a: lax.full_like(a, 0, shape=a.shape[1:]), stacks)
        return step(carry, xs, dense)[0]

    carry, dense = _invariant(interpreter, eqn, once, carry)
    carry, ys = lax.scan(
        lambda carry, xs: step(carry, xs, dense),
        carry,
        stacks,
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    return [*carry, *ys]


def sizes_of_scan(eqn: JaxprEqn) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a `scan`."""
    params = eqn.params
    if "ft_in" in params:
        consts, number, _ = map(len, params["ft_in"].unpack())
        return consts, number
    return params["num_consts"], params["num_carry"]


def _is_stack(x: Value) -> bool:
    # Whether axis 0 stacks arrays that have their own rows.
    if x.axis is None:
        return x.ndim > 2
    lead = [i for i in range(x.ndim) if i - x.ndim not in as_tuple(x.axis)]
    return lead[:1] == [0] and len(lead) > 1


@add_rule(
    "while",
    of=AbstractArrayLike,
    takes="cond_jaxpr cond_nconsts body_jaxpr body_nconsts",
)
def _while(interpreter, eqn, values):
    params = eqn.params
    values = as_arrays(eqn, values)
    first = params["cond_nconsts"]
    second = first + params["body_nconsts"]
    of_cond, of_body, carry = values[:first], values[first:second], values[second:]

    def cond(carry):
        operands = [*of_cond, *carry]
        (go_on,) = interpreter.nested(eqn, params["cond_jaxpr"], operands)
        return go_on

    def body(carry, dense):
        operands = [*of_body, *carry]
        return interpreter.nested(eqn, params["body_jaxpr"], operands, dense)

    pred, *_ = opened(params["cond_jaxpr"])[0].outvars
    if pred.aval.ndim > 0:
        return _while_any(interpreter, eqn, cond, body, carry)
    carry, dense = _invariant(interpreter, eqn, body, carry)
    return lax.while_loop(cond, lambda carry: body(carry, dense), carry)


def _while_any(interpreter, eqn, cond, body, carry):
    # A batch of loops, as made by `vmap`, each of which stops on its own.
    def step(carry):
        go_on = cond(carry)

        def choose(new, old):
            places = range(go_on.ndim)
            return lax.select(lax.broadcast_in_dim(go_on, new.shape, places), new, old)

        return list(map(choose, body(carry, [True] * len(carry)), carry))

    carry = [interpreter.dequantize(x, eqn) for x in carry]
    return lax.while_loop(lambda carry: jnp.any(cond(carry)), step, carry)


def _invariant(
    interpreter: Interpreter,
    eqn: JaxprEqn,
    body: Callable[[list[Value], list[bool]], list[Value]],
    carry: list[Value],
) -> tuple[list[Value], list[bool]]:
    """Dequantizes the carried values whose type the body of a loop changes. Returns the
    initial carry, and for each of its values whether it is dense."""
    while True:
        dense = [not is_operand(x) for x in carry]
        if all(dense):
            return carry, dense
        with muted():
            out = jax.eval_shape(lambda carry, dense=dense: body(carry, dense), carry)
        same = [_kind(a) == _kind(b) for a, b in zip(carry, out, strict=True)]
        if all(a or b for a, b in zip(dense, same)):
            return carry, dense
        carry = [
            x if is_same else interpreter.dequantize(x, eqn)
            for x, is_same in zip(carry, same)
        ]


def _kind(value: Any) -> Any:
    leaves, treedef = jtu.tree_flatten(value)
    return treedef, [(a.shape, a.dtype) for a in leaves]


@add_rule("cond", of=AbstractArrayLike, takes="branches")
def _cond(interpreter, eqn, values):
    index, *operands = as_arrays(eqn, values)
    branches = eqn.params["branches"]

    def branch(jaxpr, new, dense):
        return interpreter.nested(eqn, jaxpr, new, dense)

    dense = [True] * len(eqn.outvars)
    if any(var.aval.ndim >= 2 for var in eqn.outvars):
        # A result stays packed if it has the same format and shape in all branches.
        with muted():
            outs = [
                jax.eval_shape(lambda new, b=b: branch(b, new, False), operands)
                for b in branches
            ]
        dense = [
            not all(is_operand(x) and _kind(x) == _kind(each[0]) for x in each)
            for each in zip(*outs, strict=True)
        ]
    fns = [lambda new, b=b: branch(b, new, dense) for b in branches]
    return lax.switch(index, fns, operands)
