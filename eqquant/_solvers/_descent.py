import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float, Integer

from ..formats import Parameters
from ._least_squares import refitted
from ._rounding import Rounding, total
from ._search import chosen
from ._sweep import Columns, swept


def descended(
    rounding: Rounding,
    w: Float[Array, "n g s"],
    gram: Float[Array, "k k"],
    codes: Integer[Array, "n g s"],
    parameters: Parameters,
    passes: int,
    fixed: bool,
) -> tuple[Integer[Array, "n g s"], Parameters]:
    """Coordinate descent on the error: block after block, so many times. The parameters
    of a block are refitted to its codes, by least squares, unless they are `fixed`, and
    then each code is chosen anew, all others being what they are. No error grows."""
    n, g, s = w.shape
    columns = lambda a: a.reshape(n, g * s).T

    def block(b, state):
        error, codes, parameters = state
        cut = lambda a, axis=0: lax.dynamic_slice_in_dim(a, b * s, s, axis)
        own = lax.dynamic_slice(gram, (b * s, b * s), (s, s))
        numbers = cut(columns(w))
        code = lax.dynamic_slice_in_dim(codes, b, 1, 1)[:, 0].T
        p = jtu.tree_map(lambda a: lax.dynamic_slice_in_dim(a, b, 1, 1), parameters)
        # What errors elsewhere ask of the block.
        outside = cut(gram, 1).T @ error - own @ cut(error)
        if not fixed:
            p = _better(rounding, numbers, outside, own, code, p)
        number = rounding.numbers(_as_blocks(code), p)[:, 0].T
        d = jnp.diagonal(own)[:, None]
        zeros = jnp.zeros_like(numbers)
        start = Columns(numbers, code, numbers - number, zeros[0])
        new = swept(
            rounding,
            start,
            p,
            numbers + outside / d,
            own / d.T - jnp.eye(s, dtype=own.dtype),
            zeros[:, 0],
        )
        put = lax.dynamic_update_slice_in_dim
        return (
            put(error, new.error, b * s, 0),
            put(codes, _as_blocks(new.codes), b, 1),
            jtu.tree_map(lambda a, new: put(a, new, b, 1), parameters, p),
        )

    error = columns(w - rounding.numbers(codes, parameters))
    state = (error, codes, parameters)
    step = lambda i, state: block(i % g, state)
    _, codes, parameters = lax.fori_loop(0, passes * g, step, state)
    return codes, parameters


def _better(rounding, numbers, outside, own, code, p):
    w, outside, code = _as_blocks(numbers), _as_blocks(outside), _as_blocks(code)
    weigh = lambda x: x @ own[None]
    target = outside + weigh(w)
    new = refitted(rounding, rounding.points(code), p, target, weigh)

    def loss(p):
        e = w - rounding.numbers(code, p)
        return total((2 * outside + weigh(e)) * e, p)

    # (Rounding the parameters may undo it.)
    return chosen(loss(new) < loss(p), new, p)


def _as_blocks(columns):
    return columns.T[:, None]
