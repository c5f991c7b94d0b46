from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .._progress import Watched
from .._solvers import inverse_factors
from .._trace import check_batches, Statistics


def squared_gradients(
    loss: Callable[[Any, Any], Any],
    model: PyTree,
    batches: Iterable[PyTree],
    stats: Statistics,
) -> PyTree:
    """Computes how much a loss changes if [`eqquant.GPTQ`][] rounds each weight of a
    model, for rounding errors of unit variance. From it, [`eqquant.sensitivity`][]
    predicts the error of each weight in each format.

    With the Gram matrix `L D L^T` of its inputs, `L` unit lower triangular, GPTQ leaves
    the error `z L^-1` in a weight, where `z` are independent errors of rounding. So if
    `G` is the gradient of the weight, `G L^-T` is the gradient with respect to `z`. The
    result is the squared norm of `G L^-T`, averaged over batches. For arrays without a
    Gram matrix in `stats`, it is the squared norm of the gradient.

    A gradient is a sum over tokens. If tokens are uncorrelated, the square of the sum
    is about the sum of the squares. So use many small batches: 32 of 512 tokens for a
    language model.

    !!! Example

        ```python
        gradients = eqquant.squared_gradients(loss, model, batches, stats)
        rules = eqquant.allocate(model, stats, bits=2.5, gradients=gradients)
        ```

    **Arguments:**

    - `loss`: a function of the model and a batch that returns the mean loss over the
        batch.
    - `model`: any PyTree.
    - `batches`: PyTrees of arrays. Each shape of batch is compiled once.
    - `stats`: statistics of the inputs of weights, from [`eqquant.calibrate`][]. The
        inverse factors need as much memory as they do.

    **Returns:**

    `model`, with a scalar in place of each floating-point array, and `None` in place of
    all other leaves.

    **Raises:**

    A `ValueError` if there are no batches, or if a gradient is not finite.
    """
    check_batches(batches)
    factors = _factors(stats)
    found, number = None, 0
    for batch in Watched(batches, "Differentiating"):
        new = _squares(loss, model, factors, batch)
        found = new if found is None else jtu.tree_map(jnp.add, found, new)
        number += 1
    if found is None:
        raise ValueError("`batches` should be some batches. Got none.")
    mean = jtu.tree_map(lambda a: a / number, found)
    if not all(jnp.isfinite(a) for a in jtu.tree_leaves(mean)):
        raise ValueError("The gradient of `loss` should be finite. Got NaNs, or more.")
    return mean


class _Factors(NamedTuple):
    """The inverse factors of a Gram, and the axes of the weight that it contracts."""

    inverse: Float[Array, "*lead k k"]
    contracted: tuple[int, ...]


def _factors(stats: Statistics) -> dict[str, _Factors]:
    found, inverses = {}, {}
    for path in stats:
        # (A weight that is contracted along several axes is taken along the first.)
        gram = stats[path, stats.contracted(path)[0]]
        if gram.is_diagonal:
            continue
        # Weights with the same inputs share an array. It is kept alive, so that no
        # other array gets its `id`.
        key = id(gram.value)
        if key not in inverses:
            inverses[key] = gram, inverse_factors(gram.value, gram.rows)
        found[path] = _Factors(inverses[key][1], gram.contracted)
    return found


@eqx.filter_jit
def _squares(
    loss: Any, model: PyTree, factors: dict[str, _Factors], batch: PyTree
) -> PyTree:
    gradient = eqx.filter_grad(loss)(model, batch)

    def square(path, a):
        key = jtu.keystr(path, simple=True, separator=".")
        a = a.astype(jnp.float32)
        if key in factors:
            a = _with_feedback(a, *factors[key])
        return jnp.sum(jnp.square(a))

    return jtu.tree_map_with_path(square, gradient)


def _with_feedback(a, inverse, contracted):
    last = tuple(range(-len(contracted), 0))
    a = jnp.moveaxis(a, contracted, last)
    k = inverse.shape[-1]
    outer, lead = a.shape[: a.ndim - len(contracted)], inverse.shape[:-2]
    # Each Gram belongs to one of equal parts of an axis.
    parts = [size for m, n in zip(lead, outer, strict=True) for size in (m, n // m)]
    a = a.reshape(*parts, k)
    order = [*range(0, len(parts), 2), *range(1, len(parts), 2), len(parts)]
    a = jnp.transpose(a, order)
    inverse = inverse.reshape(-1, k, k)
    return jnp.einsum(
        "mnk,mjk->mnj", a.reshape(len(inverse), -1, k), inverse, precision="highest"
    )
