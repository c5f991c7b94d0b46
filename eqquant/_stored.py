import jax.numpy as jnp
import jax.tree_util as jtu

from .formats import Stored


def check_integers(stored: Stored) -> None:
    """Raises a `TypeError` for stored arrays that something took for parameters."""
    for a in jtu.tree_leaves(stored):
        if not jnp.issubdtype(a.dtype, jnp.integer):
            raise TypeError(
                "The stored arrays of a `QuantizedArray` should be integers. Got "
                f"{a.dtype.name}: something took them for parameters. Filter those by "
                "`eqx.is_inexact_array`, not by `eqx.is_array`."
            )
