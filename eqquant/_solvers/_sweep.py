from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import Parameters
from ._rounding import Rounding


class Swept(NamedTuple):
    """Rounded columns.

    - `codes`: the codes.
    - `error`: the original numbers less the decoded ones.
    - `loss`: the sum over columns of the weighted squares of rounding errors, each
        relative to the column's corrected target.
    """

    codes: Integer[Array, "s *b g"]
    error: Float[Array, "s *b g"]
    loss: Float[Array, "*b g"]


def swept(
    rounding: Rounding,
    numbers: Float[Array, "s *#b g"],
    target: Float[Array, "s *#b g"],
    parameters: Parameters,
    feedback: Float[Array, "s s"],
    weights: Float[Array, " s"],
    by_column: bool = False,
) -> Swept:
    """Rounds one column after another. Each column is rounded from its target,
    corrected for the errors of the columns before it.

    - `numbers`: the original numbers, relative to which errors are computed.
    - `parameters`: the parameters of blocks, `*b g`, where axes may have size one. With
        `by_column`, each column has its own, `s *b g`.
    - `feedback`: `feedback[i, j]` is the factor by which the error of column `i` is
        added to column `j`. Only entries above the diagonal are used.
    - `weights`: the weight of each column's squared error in `loss`.
    """
    s, *inner = jnp.broadcast_shapes(numbers.shape, target.shape)
    at = lambda i: jtu.tree_map(lambda a: a[i], parameters) if by_column else parameters
    if not by_column:
        inner = jnp.broadcast_shapes(inner, parameters.scale.shape)
    m = _most_columns(s)
    size = lambda a: a.reshape(a.shape[0], -1)
    above = jnp.triu(feedback, 1)
    like = jax.ShapeDtypeStruct(tuple(inner), target.dtype)
    code, _ = jax.eval_shape(rounding.column, like, at(0))

    def some(j, state):
        # Processes `m` columns, so that the feedback of all others is one product.
        codes, error, loss = state
        cut = lambda a: lax.dynamic_slice_in_dim(a, j * m, m)
        asked = cut(above.T)
        mutual = lax.dynamic_slice_in_dim(asked, j * m, m, 1)
        t, of, d = cut(target), cut(numbers), cut(weights)
        p = jtu.tree_map(cut, parameters) if by_column else parameters
        if s > m:
            t = t + (asked @ size(error)).reshape(m, *inner)

        def column(i, state):
            codes, error, loss = state
            p_i = jtu.tree_map(lambda a: a[i], p) if by_column else p
            x = t[i] + (mutual[i] @ size(error)).reshape(inner)
            code, number = rounding.column(x, p_i)
            error = error.at[i].set(of[i] - number)
            return codes.at[i].set(code), error, loss + d[i] * (x - number) ** 2

        new = jnp.zeros_like(codes[:m]), jnp.zeros_like(error[:m])
        codes_m, error_m, loss = lax.fori_loop(0, m, column, (*new, loss))
        put = lambda a, new: lax.dynamic_update_slice_in_dim(a, new, j * m, 0)
        return put(codes, codes_m), put(error, error_m), loss

    zeros = jnp.zeros((s, *inner), target.dtype)
    start = zeros.astype(code.dtype), zeros, zeros[0]
    return Swept(*lax.fori_loop(0, s // m, some, start))


def _most_columns(s: int) -> int:
    """Returns how many columns to process at a time: a divisor of `s`."""
    return next((m for m in (16, 8, 4) if s % m == 0), s)
