from typing import Any

from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir
from jax.sharding import NamedSharding
from jaxtyping import Array

from ..kernels import run_compiled
from ._partition import known_to_compiler


def stay(a: Array, declared: NamedSharding) -> Array:
    """Constrains an array to a declared sharding, if the program runs on the devices of
    that sharding. (On other devices, `jax.lax.with_sharding_constraint` raises.)"""
    return stay_p.bind(a, sharding=declared)


stay_p = Primitive("stay")
run_compiled(stay_p)
stay_p.def_abstract_eval(lambda a, *, sharding: a)


def _lower(ctx: mlir.LoweringRuleContext, a: Any, *, sharding: NamedSharding) -> Any:
    found = known_to_compiler(ctx, sharding.mesh)
    if found is None:
        return [a]
    constrain = lambda a: lax.with_sharding_constraint(a, sharding)
    return mlir.lower_fun(constrain, multiple_results=False)(found, a)


mlir.register_lowering(stay_p, _lower)


def _batch(operands, axes, *, sharding):
    # The sharding was declared for one array, not for a batch of them.
    del sharding
    return operands[0], axes[0]


batching.primitive_batchers[stay_p] = _batch
