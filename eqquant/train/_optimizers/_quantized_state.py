from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ...formats import AbstractGrid
from ._moments import optax_library, Size, zeros


if TYPE_CHECKING:
    import optax


def quantized_state(
    step: Callable[[PyTree[Array], Any, Int[Array, ""]], tuple[PyTree[Array], Any]],
    state_type: Callable[..., Any],
    format: Callable[..., AbstractGrid],
    signed: tuple[bool, ...],
    block_size: Size,
    filter_spec: PyTree,
    min_size: Size,
    embeddings: bool,
) -> "optax.GradientTransformation":
    """A transformation whose state is the step count and some quantized moments.

    **Arguments:**

    - `step`: `(updates, state, count) -> (updates, state)`, where `count` is the number
        of the step.
    - `state_type`: makes the state from the count and the moments.
    - `format`: the class of the moments' format.
    - `signed`: for each moment, whether it can be negative.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].
    """
    library = optax_library()

    def init(params):
        options = (block_size, filter_spec, min_size, embeddings)
        moments = [zeros(params, format, each, *options) for each in signed]
        return state_type(jnp.zeros((), jnp.int32), *moments)

    def update(updates, state, params=None):
        del params
        return step(updates, state, library.safe_increment(state.count))

    return library.GradientTransformation(init, update)
