import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


# What fills up a last block counts next to nothing: a Gram with a mean diagonal of one
# has this instead of what there is not.
_little = 1e-6


def normalised(gram: Float[Array, " k *_"]) -> Float[Array, " k *_"]:
    """A Gram, or its diagonal, divided by the mean of its diagonal."""
    mean = jnp.mean(diagonal(gram))
    return gram.astype(jnp.float32) / jnp.where(mean > 0, mean, 1)


def diagonal(gram: Float[Array, " k *_"]) -> Float[Array, " k"]:
    return jnp.diagonal(gram) if gram.ndim == 2 else gram


def damped(
    gram: Float[Array, " k *_"], damping: float, rows: Float[Array, ""] | None
) -> Float[Array, " k *_"]:
    """A normalised Gram with so much added to its diagonal, and one where that is zero:
    no row has told of those inputs. With fewer rows than inputs, more is added."""
    d = diagonal(gram)
    few = 1 if rows is None else jnp.maximum(d.size / jnp.maximum(rows, 1), 1)
    more = jnp.where(d > 0, 0, jnp.ones_like(d)) + damping * few
    return gram + (jnp.diag(more) if gram.ndim == 2 else more)


def filled(gram: Float[Array, " k *_"], k: int) -> Float[Array, " m *_"]:
    """With further inputs, that have to do with none."""
    d = diagonal(gram)
    missing = k - d.size
    more = jnp.where(jnp.arange(k) < d.size, 0, jnp.float32(_little))
    if gram.ndim == 1:
        return jnp.pad(gram, (0, missing)) + more
    return jnp.pad(gram, [(0, missing), (0, missing)]) + jnp.diag(more)


def factored(
    gram: Float[Array, "k k"],
) -> tuple[Float[Array, "k k"], Float[Array, " k"]]:
    """`U` and `d` with `gram = U diag(d) U^T`. `U` is unit upper triangular."""
    root = lower_root(gram[::-1, ::-1])[::-1, ::-1]
    r = jnp.diagonal(root)
    return root / r[None, :], r**2


# What is added to the diagonal of a Gram whose mean diagonal is one, in turn.
_more = np.array([0, *10.0 ** np.arange(-6, 1)], np.float32)


def lower_root(gram: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """The lower triangular `L` with `gram = L L^T`, of a Gram that is normalised. If it
    is singular in float32, a millionth is added to its diagonal; or ten times as much,
    and so on, until there is such an `L`."""
    root = lambda i: jnp.linalg.cholesky(gram + _diagonal(gram, jnp.asarray(_more)[i]))
    again = lambda state: (state[0] < len(_more)) & ~jnp.all(jnp.isfinite(state[1]))
    start = jnp.int32(0), jnp.full_like(gram, jnp.nan)
    _, found = lax.while_loop(again, lambda s: (s[0] + 1, root(s[0])), start)
    return found


def _diagonal(gram, x):
    return x * jnp.eye(len(gram), dtype=gram.dtype)
