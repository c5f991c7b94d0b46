import functools as ft
from typing import NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ._advance import advance
from ._moments import Moment, Scalar, Storage, unbiased
from ._quantized_state import quantized_state


if TYPE_CHECKING:
    import optax


class ScaleByQuantizedAdamState(NamedTuple):
    """The step count, and the running means of each parameter's gradient (`mu`) and
    squared gradient (`nu`)."""

    count: Int[Array, ""]
    mu: PyTree[Moment]
    nu: PyTree[Moment]


def scale_by_quantized_adam(
    storage: Storage,
    decays: tuple[Scalar, Scalar],
    eps: Scalar,
    eps_root: Scalar,
    nesterov: bool,
) -> "optax.GradientTransformation":
    """`optax.scale_by_adam` with moments in this storage: signed for the first moment,
    and unsigned for the second."""
    b1, b2 = decays
    options = (b1, 1 - b1, b2, 1 - b2, eps, eps_root)
    step = lambda *given: _step(*given, options, nesterov)
    return quantized_state(step, ScaleByQuantizedAdamState, storage, (True, False))


# At module level, with every number an argument: `optax.inject_hyperparams` makes a new
# transformation in each step, which must not compile a new program.
@ft.partial(jax.jit, static_argnames="nesterov")
def _step(updates, state, count, options, nesterov):
    options = (count.astype(jnp.float32), *options)
    one = ft.partial(_one, nesterov)
    updates, mu, nu = advance(one, options, count, updates, state.mu, state.nu)
    return updates, ScaleByQuantizedAdamState(count, mu, nu)


def _one(nesterov, options, g, m, v):
    t, b1, rest1, b2, rest2, eps, eps_root = options
    # Clips to the largest number with a finite square. (Infinities should stay
    # infinite.)
    g = jnp.where(jnp.isinf(g), g, jnp.clip(g, -_most, _most))
    m = b1 * m + rest1 * g
    v = b2 * v + rest2 * g**2
    root = jnp.sqrt(v / (1 - b2**t) + eps_root)
    return unbiased(m, g, t, b1, rest1, nesterov) / (root + eps), m, v


_most = np.float32(1e19)
