from collections.abc import Callable
from typing import Any, TYPE_CHECKING

from jaxtyping import PyTree

from ...formats import Square4
from ._moments import chained, Scalar, Size, Storage
from ._quantized_adam import scale_by_quantized_adam


if TYPE_CHECKING:
    import optax


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
    return scale_by_quantized_adam(storage, (b1, b2), eps, eps_root, nesterov)


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
    scale_by = scale_by_quantized_adam(storage, (b1, b2), eps, eps_root, nesterov)
    return chained(scale_by, learning_rate, weight_decay, mask)
