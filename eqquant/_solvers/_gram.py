import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float


# The diagonal of a normalised Gram for the inputs that pad the last block: small, so
# that their errors hardly count, but not zero, so that the Gram is not singular.
_little = 1e-6


def normalised(gram: Float[Array, " k *_"]) -> Float[Array, " k *_"]:
    """Divides a Gram, or its diagonal, by the mean of its diagonal."""
    mean = jnp.mean(diagonal(gram))
    return gram.astype(jnp.float32) / jnp.where(mean > 0, mean, 1)


def diagonal(gram: Float[Array, " k *_"]) -> Float[Array, " k"]:
    return jnp.diagonal(gram) if gram.ndim == 2 else gram


def damped(
    gram: Float[Array, " k *_"], rows: Float[Array, ""] | None, damping: float = 0.01
) -> Float[Array, " k *_"]:
    """Adds `damping` to the diagonal of a normalised Gram, and one more where it is
    zero, since nothing is known of these inputs. With fewer rows than inputs, `damping`
    is scaled up by their ratio."""
    d = diagonal(gram)
    few = 1 if rows is None else jnp.maximum(d.size / jnp.maximum(rows, 1), 1)
    more = jnp.where(d > 0, 0, jnp.ones_like(d)) + damping * few
    return gram + (jnp.diag(more) if gram.ndim == 2 else more)


def filled(gram: Float[Array, " k *_"], k: int) -> Float[Array, " m *_"]:
    """Pads a Gram matrix with inputs that are uncorrelated with all others."""
    d = diagonal(gram)
    missing = k - d.size
    more = jnp.where(jnp.arange(k) < d.size, 0, jnp.float32(_little))
    if gram.ndim == 1:
        return jnp.pad(gram, (0, missing)) + more
    return jnp.pad(gram, [(0, missing), (0, missing)]) + jnp.diag(more)


def factored(
    gram: Float[Array, "k k"],
) -> tuple[Float[Array, "k k"], Float[Array, " k"]]:
    """Returns `U` and `d` with `gram = U diag(d) U^T`. `U` is unit upper triangular."""
    root = lower_root(gram[::-1, ::-1])[::-1, ::-1]
    r = jnp.diagonal(root)
    return root / r[None, :], r**2


# The terms to try in turn on the diagonal of a Gram whose mean diagonal is one.
_more = np.array([0, *10.0 ** np.arange(-6, 1)], np.float32)


def lower_root(gram: Float[Array, "k k"]) -> Float[Array, "k k"]:
    """Returns the lower triangular `L` with `gram = L L^T` for a normalised Gram. If it
    is singular in float32, 1e-6 is added to its diagonal, then ten times as much, and
    so on, until the factorisation succeeds."""
    root = lambda i: _cholesky(gram + _diagonal(gram, jnp.asarray(_more)[i]))
    again = lambda state: (state[0] < len(_more)) & ~jnp.all(jnp.isfinite(state[1]))
    start = jnp.int32(0), jnp.full_like(gram, jnp.nan)
    _, found = lax.while_loop(again, lambda s: (s[0] + 1, root(s[0])), start)
    return found


# The size of the blocks that LAPACK factorises. For larger ones it uses all threads,
# which then wait for each other for far longer than they work.
_size = 64


def _cholesky(gram):
    # Block by block: the next rows of the factor follow from the Gram less the product
    # of the rows found so far.
    k = len(gram)
    gram = filled(gram, k + -k % _size)

    def block(i, upper):
        cut = lambda a, axis=0: lax.dynamic_slice_in_dim(a, i * _size, _size, axis)
        rows = cut(gram) - cut(upper, 1).T @ upper
        own = lax.linalg.cholesky(cut(rows, 1), symmetrize_input=False)
        d = jnp.diagonal(own)
        rows = inverse_of_unit(own / d[None]) @ rows / d[:, None]
        return lax.dynamic_update_slice_in_dim(upper, rows, i * _size, 0)

    upper = lax.fori_loop(0, len(gram) // _size, block, jnp.zeros_like(gram))
    return jnp.triu(upper)[:k, :k].T


def inverse_of_unit(triangular: Float[Array, "*b s s"]) -> Float[Array, "*b s s"]:
    """Returns the inverse of triangular matrices whose diagonals are one."""
    # The lower left block of the inverse of `[[A, 0], [C, B]]` is `-B^-1 C A^-1`. So
    # each step goes from the inverses of diagonal blocks to blocks of twice the size.
    *b, s, _ = shape = triangular.shape

    def double(i, inverse):
        row, column = (lax.broadcasted_iota(i.dtype, shape, len(b) + j) for j in (0, 1))
        between = (row ^ column) >> i == 1
        return inverse - inverse @ jnp.where(between, triangular, 0) @ inverse

    identity = jnp.broadcast_to(jnp.eye(s, dtype=triangular.dtype), shape)
    return lax.fori_loop(0, (s - 1).bit_length(), double, identity)


def _diagonal(gram, x):
    return x * jnp.eye(len(gram), dtype=gram.dtype)
