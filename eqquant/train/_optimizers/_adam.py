from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from ...formats import Dynamic8, Square4
from ._moments import chained, Moment, Scalar, Size, Storage, unbiased
from ._quantized_state import quantized_state


if TYPE_CHECKING:
    import optax


class ScaleByQuantizedAdamState(NamedTuple):
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
        to a boolean. All other moments stay in float32.
    - `min_size`: parameters with fewer elements keep their moments in float32.
    - `embeddings`: whether the moments of an `eqx.nn.Embedding` are in 8 bits, too. By
        default they stay in float32, since few rows have a gradient in any one step.
        (Embeddings of other modules can be excluded by `filter_spec`.)

    Moments are sharded over the same devices as their parameters.

    A NaN or an infinity in a gradient makes the moments of its block NaN. Finite
    gradients beyond 1e19, whose squares overflow, count as 1e19.

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
    storage = Storage(Dynamic8, block_size, filter_spec, min_size, embeddings)
    return _scale_by(storage, (b1, b2), eps, eps_root, nesterov)


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
    storage = Storage(Dynamic8, block_size, filter_spec, min_size, embeddings)
    scale_by = _scale_by(storage, (b1, b2), eps, eps_root, nesterov)
    return chained(scale_by, learning_rate, weight_decay, mask)


def scale_by_adam4bit(
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    *,
    nesterov: bool = False,
    block_size: Size = 128,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.scale_by_adam` with a state of 1.06 bytes per parameter instead of eight.
    Both moments are flattened and stored in [`eqquant.Square4`][] with dithered
    rounding; the second moment is unsigned. The stored second moment is at least 1/256
    of the largest one in its block: parameters whose gradients are less than 1/16 of
    the largest in the block learn more slowly than with `optax.scale_by_adam`.

    **Arguments:**

    - `b1`, `b2`, `eps`, `eps_root`, `nesterov`: as in `optax.scale_by_adam`.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    The errors of [`eqquant.train.scale_by_adam8bit`][].

    ??? cite "Reference"

        Memory Efficient Optimizers with 4-bit States. Li et al., 2023.
    """
    storage = Storage(Square4, block_size, filter_spec, min_size, embeddings)
    return _scale_by(storage, (b1, b2), eps, eps_root, nesterov)


def adamw4bit(
    learning_rate: Scalar | Callable[[Any], Any],
    b1: Scalar = 0.9,
    b2: Scalar = 0.999,
    eps: Scalar = 1e-8,
    eps_root: Scalar = 0.0,
    weight_decay: Scalar = 1e-4,
    mask: Any = None,
    *,
    nesterov: bool = False,
    block_size: Size = 128,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.adamw` with a state of 1.06 bytes per parameter. Used like
    [`eqquant.train.adamw8bit`][].

    **Arguments:**

    - `learning_rate`, `b1`, `b2`, `eps`, `eps_root`, `weight_decay`, `mask`,
        `nesterov`: as in `optax.adamw`.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    The errors of [`eqquant.train.scale_by_adam8bit`][].
    """
    storage = Storage(Square4, block_size, filter_spec, min_size, embeddings)
    scale_by = _scale_by(storage, (b1, b2), eps, eps_root, nesterov)
    return chained(scale_by, learning_rate, weight_decay, mask)


def _scale_by(
    storage: Storage,
    decays: tuple[Scalar, Scalar],
    eps: Scalar,
    eps_root: Scalar,
    nesterov: bool,
) -> "optax.GradientTransformation":
    # The first moment is signed, and the second is not.
    b1, b2 = decays
    options = (b1, 1 - b1, b2, 1 - b2, eps, eps_root)
    state = ScaleByQuantizedAdamState
    return quantized_state(_one, options, state, storage, (True, False), (nesterov,))


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
