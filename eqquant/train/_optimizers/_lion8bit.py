from collections.abc import Callable
from typing import Any, NamedTuple, TYPE_CHECKING

import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from ...formats import Dynamic8
from ._moments import chained, Moment, Scalar, Size, Storage
from ._quantized_state import quantized_state


if TYPE_CHECKING:
    import optax


class ScaleByLion8bitState(NamedTuple):
    """The step count, and the running mean of each parameter's gradient."""

    count: Int[Array, ""]
    mu: PyTree[Moment]


def scale_by_lion8bit(
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    *,
    block_size: Size = 256,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.scale_by_lion` with a state of one byte per parameter instead of four. The
    moment is flattened and stored in [`eqquant.Dynamic8`][] with dithered rounding.

    **Arguments:**

    - `b1`, `b2`: as in `optax.scale_by_lion`.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed.

    ??? cite "Reference"

        Symbolic Discovery of Optimization Algorithms. Chen et al., 2023.

        8-bit Optimizers via Block-wise Quantization. Dettmers et al., 2022.
    """
    storage = Storage(Dynamic8, block_size, filter_spec, min_size, embeddings)
    options = (b1, 1 - b1, b2, 1 - b2)
    return quantized_state(_one, options, ScaleByLion8bitState, storage, (True,))


def _one(options, g, m):
    _, b1, rest1, b2, rest2 = options
    return jnp.sign(b1 * m + rest1 * g), b2 * m + rest2 * g


def lion8bit(
    learning_rate: Scalar | Callable[[Any], Any],
    b1: Scalar = 0.9,
    b2: Scalar = 0.99,
    weight_decay: Scalar = 1e-3,
    mask: Any = None,
    *,
    block_size: Size = 256,
    filter_spec: PyTree = True,
    min_size: Size = 4096,
    embeddings: bool = False,
) -> "optax.GradientTransformation":
    """`optax.lion` with a state of one byte per parameter. Used like
    [`eqquant.train.adamw8bit`][].

    **Arguments:**

    - `learning_rate`, `b1`, `b2`, `weight_decay`, `mask`: as in `optax.lion`.
    - `block_size`, `filter_spec`, `min_size`, `embeddings`: as in
        [`eqquant.train.scale_by_adam8bit`][].

    **Returns:**

    An `optax.GradientTransformation`.

    **Raises:**

    A `ModuleNotFoundError` if optax is not installed.
    """
    scale_by = scale_by_lion8bit(
        b1,
        b2,
        block_size=block_size,
        filter_spec=filter_spec,
        min_size=min_size,
        embeddings=embeddings,
    )
    return chained(scale_by, learning_rate, weight_decay, mask)
