from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ._moments import optax_library, Storage


if TYPE_CHECKING:
    import optax


def quantized_state(
    step: Callable[[PyTree[Array], Any, Int[Array, ""]], tuple[PyTree[Array], Any]],
    state_type: Callable[..., Any],
    storage: Storage,
    signed: tuple[bool, ...],
) -> "optax.GradientTransformation":
    """A transformation whose state is the step count and some quantized moments.

    - `step`: `(updates, state, count) -> (updates, state)`, where `count` is the number
        of the step.
    - `state_type`: makes the state from the count and the moments.
    - `storage`: how the moments are stored.
    - `signed`: for each moment, whether it can be negative.
    """
    library = optax_library()

    def init(params):
        moments = [storage.zeros(params, each) for each in signed]
        return state_type(jnp.zeros((), jnp.int32), *moments)

    def update(updates, state, params=None):
        del params
        return step(updates, state, library.safe_increment(state.count))

    return library.GradientTransformation(init, update)
