import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.scipy.linalg import solve_triangular
from jaxtyping import Array, Float, Integer

from ..formats import Parameters
from ._gram import diagonal, factored
from ._rounding import Rounding, total
from ._search import chosen, Search
from ._sweep import Columns, swept


def ldlq(
    rounding: Rounding,
    w: Float[Array, "n g s"],
    gram: Float[Array, "k k"],
    tries: int,
    by_importance: bool,
) -> tuple[Integer[Array, "n g s"], Parameters]:
    """Rounds one column after another, and finds the parameters of each block on the
    way: of the most promising candidates, those with the least error after all columns
    of the block.

    With `gram = U D U^T`, `U` unit upper triangular, the error of a row is the sum over
    columns `k` of `D_k (t_k - q_k)^2`, where `t_k = w_k + sum_{j<k} (w_j - q_j) U_jk`.
    So each column is rounded as well as can be if those after it make up for it.
    """
    n, g, s = w.shape
    blocks, order = _order(gram, g, s, by_importance)
    upper, weights = factored(gram[order][:, order])
    columns = w.reshape(n, g * s).T[order]

    def block(b, state):
        error, codes, parameters = state
        cut = lambda a, axis=0: lax.dynamic_slice_in_dim(a, b * s, s, axis)
        numbers, d = cut(columns), cut(weights)
        asked = cut(upper, 1).T @ error
        own = lax.dynamic_slice(upper, (b * s, b * s), (s, s))
        # What the columns would become if none of this block were rounded.
        moved = numbers + solve_triangular(own, asked, trans=1, unit_diagonal=True)
        search = Search(rounding, moved.T[:, None], d[None, None])
        found = search.best(tries)
        empty = jnp.zeros((s, n), codes.dtype)
        zeros = jnp.zeros_like(numbers)
        start = Columns(numbers, empty, zeros, zeros[0])
        feedback = own - jnp.eye(s, dtype=own.dtype)

        def attempt(best, p):
            new = swept(rounding, start, p, numbers + asked, feedback, d)
            loss = total(new.loss[:, None, None], p)
            better = loss < best[0]
            this, old = (loss, p), (best[0], best[1])
            kept = chosen(better, this, old)
            row = better[:, 0, 0][None]
            both = chosen(row, (new.codes, new.error), best[2:])
            return (*kept, *both), None

        first = jtu.tree_map(lambda a: a[0], found)
        never = jnp.full_like(total(zeros[0][:, None, None], first), jnp.inf)
        best = (never, first, empty, zeros)
        (_, p, codes_b, error_b), _ = lax.scan(attempt, best, found)
        put = lax.dynamic_update_slice_in_dim
        parameters = jtu.tree_map(
            lambda a, new: put(a, new, blocks[b], 1), parameters, p
        )
        error = put(error, error_b, b * s, 0)
        return error, put(codes, codes_b, b * s, 0), parameters

    like = jax.eval_shape(lambda w: _example(rounding, w), w)
    codes, parameters = jtu.tree_map(lambda a: jnp.zeros(a.shape, a.dtype), like)
    codes = codes.reshape(n, g * s).T
    state = (jnp.zeros_like(columns), codes, parameters)
    _, codes, parameters = lax.fori_loop(0, g, block, state)
    return codes[jnp.argsort(order)].T.reshape(n, g, s), parameters


def ldlq_given(
    rounding: Rounding,
    w: Float[Array, "n g s"],
    gram: Float[Array, "k k"],
    parameters: Parameters,
) -> Integer[Array, "n g s"]:
    """The same with given parameters, `_ g 1`. Columns come in the order of their
    importance, whichever block they belong to."""
    n, g, s = w.shape
    k = g * s
    order = jnp.argsort(-diagonal(gram))
    upper, weights = factored(gram[order][:, order])
    columns = w.reshape(n, k).T[order]
    of_columns = jtu.tree_map(
        lambda a: jnp.moveaxis(a, 1, 0)[order // s][..., None], parameters
    )
    like, _ = jax.eval_shape(lambda w: _example(rounding, w), w)
    start = Columns(
        columns,
        jnp.zeros((k, n), like.dtype),
        jnp.zeros_like(columns),
        jnp.zeros_like(columns[0]),
    )
    feedback = upper - jnp.eye(k, dtype=upper.dtype)
    found = swept(rounding, start, of_columns, columns, feedback, weights)
    return found.codes[jnp.argsort(order)].T.reshape(n, g, s)


def _example(rounding, w):
    p = jtu.tree_map(lambda a: a[0], rounding.candidates(w))
    return rounding.codes(w, p), p


def _order(gram, g, s, by_importance):
    """The order of blocks, and that of the columns: those of a block stay together."""
    if not by_importance:
        return jnp.arange(g), jnp.arange(g * s)
    d = diagonal(gram).reshape(g, s)
    blocks = jnp.argsort(-jnp.sum(d, -1))
    inside = jnp.argsort(-d, -1) + s * jnp.arange(g)[:, None]
    return blocks, inside[blocks].ravel()
