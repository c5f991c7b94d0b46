from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .._progress import Watched


def squared_gradients(
    loss: Callable[[Any, Any], Any], model: PyTree, batches: Iterable[PyTree]
) -> PyTree:
    """Computes the squared norm of the gradient of a loss with respect to each array of
    a model, averaged over batches. From it, [`eqquant.sensitivity`][] estimates how
    much the products of each weight matter to the loss.

    The gradient of a weight is the sum over tokens of `g x^T`, where `x` is its input
    and `g` the gradient at its outputs. If tokens are uncorrelated, the square of this
    sum is about the sum of the squares `|g|^2 |x|^2`. So use many small batches: 32 of
    512 tokens for a language model.

    !!! Example

        ```python
        gradients = eqquant.squared_gradients(loss, model, batches)
        rules = eqquant.allocate(model, stats, bits=2.5, gradients=gradients)
        ```

    **Arguments:**

    - `loss`: a function of the model and a batch that returns the mean loss over the
        batch.
    - `model`: any PyTree.
    - `batches`: PyTrees of arrays. Each shape of batch is compiled once.

    **Returns:**

    `model`, with a scalar in place of each floating-point array, and `None` in place of
    all other leaves.

    **Raises:**

    A `ValueError` if there are no batches, or if a gradient is not finite.
    """
    found, number = None, 0
    for batch in Watched(batches, "Differentiating"):
        new = _squares(loss, model, batch)
        found = new if found is None else jtu.tree_map(jnp.add, found, new)
        number += 1
    if found is None:
        raise ValueError("`batches` should be some batches. Got none.")
    mean = jtu.tree_map(lambda a: a / number, found)
    if not all(jnp.isfinite(a) for a in jtu.tree_leaves(mean)):
        raise ValueError("The gradient of `loss` should be finite. Got NaNs, or more.")
    return mean


@eqx.filter_jit
def _squares(loss: Any, model: PyTree, batch: PyTree) -> PyTree:
    gradient = eqx.filter_grad(loss)(model, batch)

    def square(a: Float[Array, "..."]) -> Float[Array, ""]:
        return jnp.sum(jnp.square(a.astype(jnp.float32)))

    return jtu.tree_map(square, gradient)
