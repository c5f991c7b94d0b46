from typing import Any, Literal, TypeAlias

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


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
