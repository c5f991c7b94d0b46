import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Shaped

from ._view import Factor, Index, merged


# Products that contract parts of axes of a leaf, such as half of an axis, or each of
# several groups of an axis with its own inputs.


class Piece(NamedTuple):
    """The part of the contracted axes that a product contracts.

    - `factors`: the contracted factor of each axis, in order.
    - `across`: the rest of one of these axes, each index of which makes a piece of its
        own; `None` if there is no rest.
    - `batch`: the batch axis of the product that `across` is; `None` if all these
        pieces meet the same inputs.
    - `is_known`: whether the pieces are known.
    """

    factors: tuple[Factor, ...]
    across: Factor | None
    batch: int | None
    is_known: bool


def piece_of(
    factors: Sequence[Factor],
    shape: Sequence[int],
    over: Sequence[tuple[Factor, ...]],
    free: Sequence[Factor],
    at: Sequence[Index],
) -> Piece | None:
    """Returns the piece of a leaf of this `shape` that a product contracts, from the
    contracted factor of each axis, and the indices `at` of the view; `None` if it
    contracts whole axes.

    - `over`, `free`: the factors of the batch axes of the view, and the factors of its
        axes that are neither batch axes nor contracted.
    """
    if all(f.size == shape[f.axis] for f in factors):
        return None
    axes = {f.axis for f in factors}
    left = [(i, f) for i, dim in enumerate(over) for f in dim if f.axis in axes]
    left += [(None, f) for f in free if f.axis in axes]
    batch, across = left[0] if left else (None, None)
    known = len(left) <= 1 and all(f.start is not None for f in factors)
    known = known and not any(index.factor.axis in axes for index in at)
    if across is not None:
        (other,) = [f for f in factors if f.axis == across.axis]
        known = known and across.start is not None
        known = known and _joint(other, across) is not None
        known = known and (batch is None or len(over[batch]) == 1)
    return Piece(tuple(factors), across, batch, known)


def _joint(a, b):
    # The joint factor of two, and whether `b` is the outer one.
    for outer, inner in ((a, b), (b, a)):
        both = merged((outer, inner))
        if len(both) == 1:
            return both[0], outer is b
    return None


def placed(
    value: Shaped[Array, "..."],
    rows: Shaped[Array, "*over"],
    piece: Piece,
    shape: Sequence[int],
) -> tuple[Shaped[Array, "..."], Shaped[Array, "..."]]:
    """Returns the sums of all inputs of a leaf of this `shape`, from the sums of a
    piece. They are zero for pairs that share no piece.

    - `value`: the sums of the inputs of a piece: `*over k k`, or the diagonal
        `*over k`. Several pieces lie along `piece.batch`, which is removed.
    - `rows`: the number of rows of each. A row counts by the share of all inputs that
        are in the piece.
    """
    again = value.ndim - rows.ndim
    factors, across = [*piece.factors], piece.across
    share = math.prod(f.size / shape[f.axis] for f in factors)
    if across is not None and piece.batch is None:
        value = jnp.broadcast_to(value, (across.size, *value.shape))
        rows = jnp.broadcast_to(rows, (across.size, *rows.shape))
    elif piece.batch is not None:
        value = jnp.moveaxis(value, piece.batch, 0)
        rows = jnp.moveaxis(rows, piece.batch, 0)
    lead = value.shape[: value.ndim - again]
    value = value.reshape(*lead, *[f.size for f in factors] * again)
    if across is not None:
        (i,) = [i for i, f in enumerate(factors) if f.axis == across.axis]
        found = _joint(factors[i], across)
        assert found is not None
        factors[i], outer = found
        value = _diagonal(value, len(lead), len(factors), i + (not outer), again)
        lead, rows = lead[1:], jnp.sum(rows, 0)
        value = value.reshape(*lead, *[f.size for f in factors] * again)
    sizes = [shape[f.axis] for f in factors]
    padding = [_padding(f, n) for f, n in zip(factors, sizes)]
    zero = jnp.zeros((), value.dtype)
    value = lax.pad(value, zero, [*[(0, 0, 0)] * len(lead), *padding * again])
    return value.reshape(*lead, *[math.prod(sizes)] * again), rows * share


def _diagonal(value, lead, axes, place, again):
    # Moves the first axis of `value` into each group of axes, at this place. With two
    # groups, other entries than the diagonal of both are zero.
    n = value.shape[0]
    value = jnp.moveaxis(value, 0, lead - 1 + place)
    if again == 1:
        return value
    second = lead - 1 + axes + 1 + place
    value = jnp.expand_dims(value, second)
    ones = [1] * value.ndim
    ones[lead - 1 + place] = ones[second] = n
    return value * jnp.eye(n, dtype=value.dtype).reshape(ones)


def _padding(f, n):
    start = f.start or 0
    return start, n - start - f.stride * (f.size - 1) - 1, f.stride - 1
