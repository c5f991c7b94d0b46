import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jaxtyping import Array, Float

from ._history import History
from ._operand import Operand
from ._product import product, Roundings


# The type in `lax.dot_general`, of hashable tuples or not.
DotDimensionNumbers: TypeAlias = tuple[
    tuple[Sequence[int], Sequence[int]], tuple[Sequence[int], Sequence[int]]
]


def rounded_dot(
    x: Float[Array, "..."],
    w: Float[Array, "..."],
    dimension_numbers: DotDimensionNumbers,
    roundings: Roundings,
    dtype: Any,
    packed: Operand | None = None,
    history: History | None = None,
) -> Float[Array, "..."]:
    """`lax.dot_general` of rounded operands, in a dtype. Scales extend over all
    contracted axes. `packed` may be the second operand, already rounded, with its
    contracted axis last and its other axes in order."""
    (x_contracted, w_contracted), (x_batch, w_batch) = dimension_numbers
    x_free = _others(x.ndim, x_contracted, x_batch)
    w_free = _others(w.ndim, w_contracted, w_batch)
    stack = [x.shape[i] for i in x_batch]
    # There is always at least one row.
    rows = [x.shape[i] for i in x_free] or [1]
    depth = math.prod(x.shape[i] for i in x_contracted)
    columns = math.prod(w.shape[i] for i in w_free)
    x = lax.transpose(x, [*x_batch, *x_free, *x_contracted])
    left = x.reshape(*stack, *rows, depth).astype(dtype)
    moved = lax.transpose(w, [*w_batch, *w_free, *w_contracted])
    right = moved.reshape(*stack, columns, depth)
    if packed is not None:
        lead = moved.shape[: moved.ndim - len(w_contracted)]

        def merge(a):  # The scale of a matrix has size one in place of its rows.
            a = jnp.broadcast_to(a, (*lead, a.shape[-1]))
            return a.reshape(*stack, columns, a.shape[-1])

        packed = Operand(jtu.tree_map(merge, packed.stored), packed.layout)
    if history is not None:
        of_each = list(w_batch) == list(range(history.steps.ndim - 2))
        history = history if of_each else history.merged()
        wide = lambda a: jnp.broadcast_to(a, (*stack, *a.shape[-2:]))
        history = jtu.tree_map(wide, history)
    y = product(left, right, packed, len(stack), roundings, history)
    # (The axes of `x` are in order now.)
    last = len(stack) + len(x_free)
    return y.reshape(*x.shape[:last], *[w.shape[i] for i in w_free])


def is_rounded(dimension_numbers: DotDimensionNumbers, dtype: Any) -> bool:
    """Whether a product is rounded: it contracts something, and its result is of real
    floating-point numbers."""
    (contracted, _), _ = dimension_numbers
    return len(contracted) > 0 and jnp.issubdtype(dtype, jnp.floating)


def _others(ndim, *some):
    return [i for i in range(ndim) if not any(i in axes for axes in some)]
