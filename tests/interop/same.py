import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np


def bits(x):
    """The bytes of an array."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x).tobytes()


def same(a, b):
    """Whether two PyTrees are equal bit for bit, and in all that is static."""
    leaves_a, treedef_a = jtu.tree_flatten(a)
    leaves_b, treedef_b = jtu.tree_flatten(b)
    return treedef_a == treedef_b and all(map(_same_leaf, leaves_a, leaves_b))


def _same_leaf(a, b):
    if isinstance(a, jax.Array) and isinstance(b, jax.Array):
        return (a.shape, a.dtype, bits(a)) == (b.shape, b.dtype, bits(b))
    # `repr` tells -0.0 from 0.0, and takes NaN to be itself.
    return type(a) is type(b) and repr(a) == repr(b)
