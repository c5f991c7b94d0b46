import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import Parameters
from ._least_squares import Columns, refitted
from ._rounding import Rounding
from ._search import chosen
from ._sweep import swept


def descended(
    rounding: Rounding,
    w: Float[Array, "n g s"],
    gram: Float[Array, "k k"],
    codes: Integer[Array, "n g s"],
    parameters: Parameters,
    passes: int,
    fixed: bool,
) -> tuple[Integer[Array, "n g s"], Parameters]:
    """Improves codes and parameters by coordinate descent on the squared error.

    Each of the `passes` goes over all blocks. For each block, its parameters are first
    refitted to its codes by least squares, unless they are `fixed`. Then each of its
    codes is chosen again while all others are held constant. The error never grows."""
    n, g, s = w.shape
    columns = lambda a: a.reshape(n, g * s).T

    def numbers(points, p):
        return rounding.format.grid.numbers(points, *jtu.tree_map(lambda a: a[None], p))

    def block(b, state):
        error, codes, parameters = state
        cut = lambda a, axis=0: lax.dynamic_slice_in_dim(a, b * s, s, axis)
        own = lax.dynamic_slice(gram, (b * s, b * s), (s, s))
        code = cut(codes)[..., None]
        p = jtu.tree_map(lambda a: lax.dynamic_slice_in_dim(a, b, 1, 1), parameters)
        points = rounding.points(code)
        number = numbers(points, p)
        # The gradient of the squared error with respect to the errors of this block, up
        # to a factor.
        asked = (cut(gram, 1).T @ error)[..., None]
        weigh = lambda x: (own @ x[..., 0])[..., None]
        if not fixed:
            ones = jnp.sum(own, -1)[:, None, None]
            found = Columns(points, weigh(points), ones, asked)
            new, better = refitted(rounding, p, found)
            p = chosen(better, new, p)
            old, number = number, numbers(points, p)
            asked += weigh(old - number)
        d = jnp.diagonal(own)
        new = swept(
            rounding, number, number + asked / d[:, None, None], p, own / d[None], 0 * d
        )
        put = lax.dynamic_update_slice_in_dim
        now = new.error + cut(columns_of_w)[..., None] - number
        return (
            put(error, now[..., 0], b * s, 0),
            put(codes, new.codes[..., 0], b * s, 0),
            jtu.tree_map(lambda a, new: put(a, new, b, 1), parameters, p),
        )

    columns_of_w = columns(w)
    error = columns(w - rounding.numbers(codes, parameters))
    state = (error, columns(codes), jtu.tree_map(lambda a: a[..., 0], parameters))
    step = lambda i, state: block(i % g, state)
    _, codes, parameters = lax.fori_loop(0, passes * g, step, state)
    codes = codes.T.reshape(n, g, s)
    return codes, jtu.tree_map(lambda a: a[..., None], parameters)
