from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from ..._product import full_spec, names_of


# The products of a training step: of a dense array with an operand that is already
# rounded. The operand is the weight `W[*b, n, k]`, or the inputs `X[*b, *r, k]`.
#
#   along    x[*b, *r, k] with W   ->  y[*b, *r, n]   the layer
#   across   y[*b, *r, n] with W   ->  x[*b, *r, k]   its transpose
#   spread   w[*b, n, k]  with X   ->  y[*b, *r, n]   the layer, as a function of `w`
#   outer    y[*b, *r, n] with X   ->  w[*b, n, k]    its transpose
Kind: TypeAlias = Literal["along", "across", "spread", "outer"]


def dims_of(kind: Kind, ndim: int, stack: int):
    """Returns the dimension numbers of a product whose `y` or `X` has `ndim` axes."""
    last, batch = ndim - 1, tuple(range(stack))
    contracted = {
        "along": ((last,), (stack + 1,)),
        "across": ((last,), (stack,)),
        "spread": ((last,), (stack + 1,)),
        "outer": (tuple(range(stack, last)), tuple(range(stack, last))),
    }
    return contracted[kind], (batch, batch)


def dot(a: Array, b: Array, dims: Any, wide: Any) -> Array:
    return lax.dot_general(a, b, dims, preferred_element_type=wide)


def floats(a: Array, b: Array, dims: Any, dtype: Any) -> Float[Array, "..."]:
    """Multiplies floats in a dtype, accumulated in 32 bits at least."""
    wide = jnp.promote_types(dtype, jnp.float32)
    return dot(a.astype(dtype), b.astype(dtype), dims, wide).astype(dtype)


def result(kind: Kind, stack: int, x: tuple, operand: tuple) -> tuple:
    """Returns one entry for each axis of the result of a product, from the entries of
    its arguments: sizes, or entries of specs."""
    if kind == "spread":
        return (*operand[:-1], x[-2])
    if kind == "outer":
        return (*operand[:stack], x[-1], operand[-1])
    return (*x[:-1], operand[-2 if kind == "along" else -1])


def result_sharding(kind: Kind, stack: int, x: Any, codes: Any) -> NamedSharding | None:
    """Returns the sharding of the result of a product, if the types of its arguments
    `x` and `codes` carry shardings: each remaining axis keeps its sharding, unless
    another axis takes the same mesh axes."""
    sharding = x.sharding
    if not sharding.mesh.explicit_axes:
        return None
    specs = [tuple(full_spec(a.sharding.spec, a.ndim)) for a in (x, codes)]
    taken, entries = set(), []
    for entry in result(kind, stack, *specs):
        names = set(names_of(entry))
        entries.append(None if taken & names else entry)
        taken |= names
    return NamedSharding(sharding.mesh, PartitionSpec(*entries))
