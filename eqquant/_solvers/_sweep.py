from typing import NamedTuple

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import Parameters
from ._rounding import Rounding


class Columns(NamedTuple):
    """Some columns of a matrix, each of which is an axis here: `s n`.

    - `numbers`: the numbers.
    - `codes`: the codes that were chosen.
    - `error`: the numbers less what the codes stand for.
    - `loss`: the sum, over columns, of the weighted squares of what was rounded off.
    """

    numbers: Float[Array, "s n"]
    codes: Integer[Array, "s n"]
    error: Float[Array, "s n"]
    loss: Float[Array, " n"]


def swept(
    rounding: Rounding,
    columns: Columns,
    parameters: Parameters,
    target: Float[Array, "s n"],
    feedback: Float[Array, "s s"],
    weights: Float[Array, " s"],
) -> Columns:
    """Rounds one column after another. What is rounded is its target, and what errors
    of the other columns, of all as they are by then, ask of it.

    **Arguments:**

    - `parameters`: for each row, `_ 1 1`; or for each column, too, `s _ 1 1`.
    - `feedback`: how much of the error of each column (the first axis) each column
        takes. The diagonal is zero.
    - `weights`: what a square counts in `loss`.
    """
    s, n = target.shape
    m = _most_columns(s)
    each = parameters.scale.ndim == 4

    def column(i, state):
        codes, error, loss, t, mutual, at = state
        here = at + i
        asked = lax.dynamic_index_in_dim(mutual, i, 1)
        error_m = lax.dynamic_slice_in_dim(error, at, m)
        x = t[i] + jnp.sum(asked * error_m, 0)
        p = jtu.tree_map(lambda a: a[here], parameters) if each else parameters
        x_blocks = x[:, None, None]
        code = rounding.codes(x_blocks, p)
        number = rounding.numbers(code, p)[:, 0, 0]
        loss += weights[here] * (x - number) ** 2
        error = error.at[here].set(columns.numbers[here] - number)
        return codes.at[here].set(code[:, 0, 0]), error, loss, t, mutual, at

    def some(j, state):
        # Columns that are near each other, so that errors of others are asked for once.
        codes, error, loss = state
        at = j * m
        t = lax.dynamic_slice_in_dim(target, at, m)
        mutual = lax.dynamic_slice(feedback, (at, at), (m, m))
        if s > m:
            asked = lax.dynamic_slice_in_dim(feedback, at, m, 1)
            error_m = lax.dynamic_slice_in_dim(error, at, m)
            t += asked.T @ error - mutual.T @ error_m
        state = (codes, error, loss, t, mutual, at)
        return lax.fori_loop(0, m, column, state)[:3]

    start = (columns.codes, columns.error, jnp.zeros_like(columns.numbers[0]))
    codes, error, loss = lax.fori_loop(0, s // m, some, start)
    return Columns(columns.numbers, codes, error, loss)


def _most_columns(s: int) -> int:
    """How many columns are near each other: a divisor of `s`."""
    return next((m for m in range(min(s, 128), 15, -1) if s % m == 0), s)
