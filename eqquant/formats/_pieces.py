from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Shaped


# This many numbers, with their intermediate results, stay in the caches of a CPU.
_enough = 2**17


def by_pieces(
    fn: Callable[[Float[Array, "*b p k"]], Shaped[Array, "*b p _"]],
    x: Float[Array, "*b k"],
) -> Shaped[Array, "*b _"]:
    """Returns `fn(x)`, computed for some rows at a time. This saves memory in functions
    with many intermediate results for each row."""
    *lead, k = x.shape
    rows = _rows_at_a_time(lead[-1], x.size // max(1, lead[-1])) if lead else None
    if rows is None or rows == lead[-1]:
        return fn(x)
    # Takes rows that are far apart, so that each device has some of them if they are
    # sharded.
    *lead, n = lead
    x = x.reshape(*lead, rows, n // rows, k)
    at = lambda i: fn(lax.dynamic_index_in_dim(x, i, -2, keepdims=False))
    found = lax.map(at, jnp.arange(n // rows))
    found = jnp.moveaxis(found, 0, -2)
    return found.reshape(*lead, n, found.shape[-1])


def _rows_at_a_time(n, width):
    return next((p for p in range(1, n) if n % p == 0 and p * width >= _enough), n)
