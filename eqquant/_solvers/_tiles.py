from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, UInt

from ..formats import AbstractTiled
from ._gram import lower_root


# A function with the arguments and the result of `AbstractTiled.nearest_tile`.
NearestTile = Callable[..., UInt[Array, "n _"]]


class Tiles(NamedTuple):
    """The rounded tiles of a matrix.

    - `codes`: the packed codes.
    - `numbers`: the decoded numbers.
    - `scale`: the scale of each row, rounded to a value that can be stored.
    """

    codes: UInt[Array, "n w"]
    numbers: Float[Array, "n k"]
    scale: Float[Array, "n 1"]


def rounded_tiles(
    format: AbstractTiled,
    nearest_tile: NearestTile,
    w: Float[Array, "n k"],
    gram: Float[Array, "k k"],
) -> Tiles:
    """Rounds one tile after another, from the last one to the first.

    With `gram = L D L^T`, `L` unit lower triangular, the error of a row is the sum over
    columns `k` of `D_k (t_k - q_k)^2`, where `t_k = w_k + sum_{j>k} (w_j - q_j) L_jk`.
    When a tile is rounded, the errors of all later tiles are known, so they become part
    of its target. The format itself accounts for the feedback within a tile.
    """
    n, k = w.shape
    root = lower_root(gram)
    r = jnp.diagonal(root)
    lower, weights = root / r[None, :], r**2
    scale = format.fit(w)

    def tile(start, size, error):
        cut = lambda a, axis: lax.dynamic_slice_in_dim(a, start, size, axis)
        numbers, d = cut(w, 1), cut(weights, 0)
        columns = cut(lower, 1)
        target = numbers + error @ columns
        # Normalised, since a format may expect weights of about one.
        d = d / jnp.mean(d)
        codes = nearest_tile(format, numbers, target, scale, cut(columns, 0), d)
        found = numbers - format.points(codes)[:, :size] * scale
        return codes, lax.dynamic_update_slice_in_dim(error, found, start, 1)

    number, rest = divmod(k, format.tile)
    error, last = jnp.zeros_like(w), []
    if rest > 0:
        codes, error = tile(number * format.tile, rest, error)
        last = [codes]
    if number > 0:

        def step(error, i):
            codes, error = tile(i * format.tile, format.tile, error)
            return error, codes

        order = jnp.arange(number, dtype=jnp.int32)
        error, codes = lax.scan(step, error, order, reverse=True)
        last = [jnp.moveaxis(codes, 0, 1).reshape(n, -1), *last]
    return Tiles(jnp.concatenate(last, 1), w - error, scale)


def refitted_rows(
    format: AbstractTiled,
    w: Float[Array, "n k"],
    gram: Float[Array, "k k"],
    tiles: Tiles,
) -> Tiles:
    """Keeps the codes, and fits the scale of each row by least squares."""
    weighed = tiles.numbers @ gram
    square = jnp.sum(weighed * tiles.numbers, -1, keepdims=True)
    both = jnp.sum(weighed * w, -1, keepdims=True)
    ratio = jnp.where(square > 0, both / jnp.where(square > 0, square, 1), 1)
    new = format.held(tiles.scale * ratio)
    # Rounding the new scale may undo the improvement.
    step = new / jnp.where(tiles.scale == 0, 1, tiles.scale) - 1
    better = (new > 0) & (step * (step * square + 2 * (square - both)) < 0)
    scale = jnp.where(better, new, tiles.scale)
    numbers = jnp.where(better, tiles.numbers * (1 + step), tiles.numbers)
    return Tiles(tiles.codes, numbers, scale)
