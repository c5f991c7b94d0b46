import functools as ft
from collections.abc import Callable
from typing import Any, TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array

from ._advance import advance
from ._moments import optax_library, Scalar, Storage


if TYPE_CHECKING:
    import optax


def quantized_state(
    one: Callable[..., tuple[Array, ...]],
    options: tuple[Scalar, ...],
    state_type: Callable[..., Any],
    storage: Storage,
    signed: tuple[bool, ...],
    static: tuple[Any, ...] = (),
) -> "optax.GradientTransformation":
    """A transformation whose state is the step count and some quantized moments.

    - `one`: `(*static, (t, *options), gradient, *moments) -> (update, *moments)`, where
        `t` is the number of the step. Elementwise, in float32.
    - `options`: hyperparameters: numbers and scalar arrays.
    - `state_type`: makes the state from the count and the moments.
    - `storage`: how the moments are stored.
    - `signed`: for each moment, whether it can be negative.
    - `static`: the options on which the compiled program depends.
    """
    library = optax_library()

    def init(params):
        moments = [storage.zeros(params, each) for each in signed]
        return state_type(jnp.zeros((), jnp.int32), *moments)

    def update(updates, state, params=None):
        del params
        count = library.safe_increment(state.count)
        return _step(one, static, state_type, options, count, updates, state)

    return library.GradientTransformation(init, update)


# At module level, with every number an argument: `optax.inject_hyperparams` makes a new
# transformation in each step, which must not compile a new program.
@ft.partial(jax.jit, static_argnums=(0, 1, 2))
def _step(one, static, state_type, options, count, updates, state):
    _, *moments = state
    one, options = ft.partial(one, *static), (count.astype(jnp.float32), *options)
    updates, *moments = advance(one, options, count, updates, *moments)
    return updates, state_type(count, *moments)
