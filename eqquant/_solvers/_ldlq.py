import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import Parameters
from ._gram import diagonal, factored, inverse_of_unit
from ._rounding import Rounding
from ._search import chosen, grouped, Search
from ._sweep import swept


# How many numbers are rounded at a time, so that a few columns fit in the cache.
_numbers = 2**12


def ldlq(
    rounding: Rounding,
    w: Float[Array, "n g s"],
    gram: Float[Array, "k k"],
    tries: int,
    by_importance: bool,
) -> tuple[Integer[Array, "n g s"], Parameters]:
    """Rounds one column after another, and chooses the parameters of each block on the
    way: of the `tries` most promising candidates, the one with the least error after
    all columns of the block are rounded.

    With `gram = U D U^T`, `U` unit upper triangular, the error of a row is the sum over
    columns `k` of `D_k (t_k - q_k)^2`, where `t_k = w_k + sum_{j<k} (w_j - q_j) U_jk`.
    So rounding each column to nearest `t_k` is optimal if later columns compensate for
    its error.
    """
    n, g, s = w.shape
    k = g * s
    blocks, order = _order(gram, g, s, by_importance)
    upper, weights = factored(gram[order][:, order])
    columns = w.reshape(n, k).T[order]
    own = upper.reshape(g, s, g, s)[jnp.arange(g), :, jnp.arange(g)]
    # The first block has no correction to solve for. If it is the only one, it may be
    # large, so its inverse is not computed.
    inverse = inverse_of_unit(own) if g > 1 else own

    def block(b, state):
        error, codes, parameters = state
        cut = lambda a, axis=0: lax.dynamic_slice_in_dim(a, b * s, s, axis)
        numbers, d = cut(columns)[..., None], cut(weights)
        asked = cut(upper, 1).T @ error
        # The values that the columns would take if this block were not rounded.
        moved = numbers + (inverse[b].T @ asked)[..., None]
        found = Search(rounding, moved, d[:, None, None]).best(tries)
        target = numbers + asked[..., None]

        def attempt(best, some):
            new = swept(rounding, numbers[:, None], target[:, None], some, own[b], d)
            losses = new.loss
            if some.scale.shape[1] == 1:
                losses = jnp.sum(losses, 1, keepdims=True)

            def keep(i, best):
                better = losses[i] < best[0]
                this = losses[i], jtu.tree_map(lambda a: a[i], some)
                both = new.codes[:, i], new.error[:, i]
                kept = chosen(better, this, best[:2])
                return (*kept, *chosen(better[None], both, best[2:]))

            return lax.fori_loop(0, len(losses), keep, best), None

        some = grouped(found, _numbers // n)
        p = jtu.tree_map(lambda a: a[0], found)
        never = jnp.full_like(p.scale, jnp.inf)
        best = never, p, jnp.zeros((s, n, 1), codes.dtype), jnp.zeros_like(numbers)
        (_, p, codes_b, error_b), _ = lax.scan(attempt, best, some)
        put = lax.dynamic_update_slice_in_dim
        parameters = jtu.tree_map(
            lambda a, new: put(a, new, blocks[b], 1), parameters, p
        )
        error = put(error, error_b[..., 0], b * s, 0)
        return error, put(codes, codes_b[..., 0], b * s, 0), parameters

    code, p = jax.eval_shape(lambda w: _example(rounding, w), w)
    codes = jnp.zeros((k, n), code.dtype)
    p = jtu.tree_map(lambda a: jnp.zeros(a.shape[:2], a.dtype), p)
    state = (jnp.zeros_like(columns), codes, p)
    _, codes, p = lax.fori_loop(0, g, block, state)
    codes = codes[jnp.argsort(order)].T.reshape(n, g, s)
    return codes, jtu.tree_map(lambda a: a[..., None], p)


def ldlq_given(
    rounding: Rounding,
    w: Float[Array, "n g s"],
    gram: Float[Array, "k k"],
    parameters: Parameters,
) -> Integer[Array, "n g s"]:
    """Rounds as `ldlq` does, but with given parameters, `_ g 1`. Columns are rounded in
    the order of their importance, independently of their blocks."""
    n, g, s = w.shape
    k = g * s
    order = jnp.argsort(-diagonal(gram))
    upper, weights = factored(gram[order][:, order])
    columns = w.reshape(n, k).T[order][..., None]
    of_columns = jtu.tree_map(lambda a: jnp.moveaxis(a, 1, 0)[order // s], parameters)
    found = swept(rounding, columns, columns, of_columns, upper, weights, True)
    return found.codes[jnp.argsort(order), :, 0].T.reshape(n, g, s)


def _example(rounding, w):
    p = jtu.tree_map(lambda a: a[0], rounding.candidates(w))
    return rounding.codes(w, p), p


def _order(gram, g, s, by_importance):
    """Returns the order of the blocks, and the order of the columns, which keeps the
    columns of a block together."""
    if not by_importance:
        return jnp.arange(g), jnp.arange(g * s)
    d = diagonal(gram).reshape(g, s)
    blocks = jnp.argsort(-jnp.sum(d, -1))
    inside = jnp.argsort(-d, -1) + s * jnp.arange(g)[:, None]
    return blocks, inside[blocks].ravel()
