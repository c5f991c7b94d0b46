from typing import Any

from jax.extend.core import JaxprEqn

from .._implicit import opened


# Primitives that run a program once, on their operands.
calls = {
    "checkpoint",
    "closed_call",
    "core_call",
    "core_closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "shard_map",
}


def body_of(eqn: JaxprEqn) -> Any:
    """Returns the jaxpr that a call runs."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return next(eqn.params[name] for name in names if name in eqn.params)


def is_kept(jaxpr: Any, place: int, result: int) -> bool:
    """Whether the body of a loop returns an operand unchanged."""
    jaxpr, _ = opened(jaxpr)
    return jaxpr.outvars[result] is jaxpr.invars[place]
