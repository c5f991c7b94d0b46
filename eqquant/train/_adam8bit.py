import functools as ft
from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ._advance8bit import advance
from ._moments8bit import (
    chained,
    Moment,
    optax_library,
    Scalar,
    Size,
    unbiased,
    zeros,
)


if TYPE_CHECKING:
    import optax


class ScaleByAdam8bitState(NamedTuple):
    """The step count, and the running means of each parameter's gradient (`mu`) and
    squared gradient (`nu`)."""

    count: Int[Array, ""]
    mu: PyTree[Moment]
    nu: PyTree[Moment]


def scale_by_adam8bit(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    *,
    nesterov: bool = False,
    block_size: Size = 256,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.scale_by_adam` with a state of two bytes per parameter instead of eight.
    Both moments are flattened and stored in [`eqquant.Dynamic8`][] with dithered
    rounding; the second moment is unsigned.

    !!! Example

        ```python
        optimizer = optax.chain(
            optax.clip_by_global_norm(1.0),
            eqquant.train.scale_by_adam8bit(),
            optax.scale_by_learning_rate(1e-3),
        )
        ```

    **Arguments:**

    - `b1`, `b2`, `eps`, `eps_root`, `nesterov`: as in `optax.scale_by_adam`.
    - `block_size`: the number of elements that share a scale.
    - `filter_spec`: which parameters have their moments in 8 bits: a prefix PyTree of
        the parameters, as in `eqx.partition`, of booleans and of functions from a leaf
        to a boolean. The other moments stay in float32.
    - `min_size`: parameters with fewer elements keep their moments in float32.
    - `embeddings`: whether the moments of an `eqx.nn.Embedding` are in 8 bits, too. By
        default they stay in float32, since few rows have a gradient in any one step.
        (Embeddings of other modules can be excluded by `filter_spec`.)

    Moments are sharded over the same devices as their parameters.

    To compile `init` under `optax.inject_hyperparams`, pass `"block_size"` and
    `"min_size"` as `static_args`.

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed. `init` raises a `ValueError` for
    complex parameters: wrap the optimizer in `optax.contrib.split_real_and_imaginary`.

    ??? cite "Reference"

        8-bit Optimizers via Block-wise Quantization. Dettmers et al., 2022.
    """
    library = optax_library()

    def init(params):
        options = (block_size, filter_spec, min_size, embeddings)
        mu = zeros(params, True, *options)
        nu = zeros(params, False, *options)
        return ScaleByAdam8bitState(jnp.zeros((), jnp.int32), mu, nu)

    def update(updates, state, params=None):
        del params
        count = library.safe_increment(state.count)
        options = (b1, 1 - b1, b2, 1 - b2, eps, eps_root)
        return _step(updates, state, count, options, nesterov)

    return library.GradientTransformation(init, update)


# At module level, with every number an argument: `optax.inject_hyperparams` makes a new
# transformation in each step, which must not compile a new program.
@ft.partial(jax.jit, static_argnames="nesterov")
def _step(updates, state, count, options, nesterov):
    options = (count.astype(jnp.float32), *options)
    one = ft.partial(_one, nesterov)
    updates, mu, nu = advance(one, options, updates, state.mu, state.nu)
    return updates, ScaleByAdam8bitState(count, mu, nu)


def _one(nesterov, options, g, m, v):
    t, b1, rest1, b2, rest2, eps, eps_root = options
    m = b1 * m + rest1 * g
    v = b2 * v + rest2 * g**2
    root = jnp.sqrt(v / (1 - b2**t) + eps_root)
    return unbiased(m, g, t, b1, rest1, nesterov) / (root + eps), m, v


def adamw8bit(
    learning_rate: Scalar | Callable[[Any], Any],
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    block_size: Size = 256,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.adamw` with a state of two bytes per parameter.

    !!! Example

        ```python
        optimizer = eqquant.train.adamw8bit(1e-3)
        state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
        ```

    **Arguments:**

    - `learning_rate`, `b1`, `b2`, `eps`, `eps_root`, `weight_decay`, `mask`,
        `nesterov`: as in `optax.adamw`.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed.
    """
    scale_by = scale_by_adam8bit(
        b1,
        b2,
        eps,
        eps_root,
        nesterov=nesterov,
        block_size=block_size,
        filter_spec=filter_spec,
        min_size=min_size,
        embeddings=embeddings,
    )
    return chained(scale_by, learning_rate, weight_decay, mask)
