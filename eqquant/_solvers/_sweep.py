from typing import NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import Parameters
from ._rounding import Rounding


class Swept(NamedTuple):
    """Columns that were rounded.

    - `codes`: the codes that were chosen.
    - `error`: the numbers less what the codes stand for.
    - `loss`: the sum, over columns, of the weighted squares of what was rounded off.
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
    """Rounds one column after another. What is rounded is its target, and what errors
    of the columns before ask of it.

    **Arguments:**

    - `numbers`: what errors are counted from.
    - `parameters`: `*b g`, of which some axes may have size one; or for each column,
        too, `s *b g`.
    - `feedback`: how much of the error of each column (the first axis) each column
        takes. Only what is above the diagonal counts.
    - `weights`: what a square counts in `loss`.
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
        # Columns that are near each other, so that errors of others are asked for once.
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
    """How many columns are near each other: a divisor of `s`."""
    return next((m for m in (16, 8, 4) if s % m == 0), s)
