import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import PyTree

from ._weight import is_low_precision


def update_delayed(model: PyTree, grads: PyTree) -> tuple[PyTree, PyTree]:
    """Moves the largest absolute values of a step from the gradients to the model, for
    the scales of the next steps. Call this once for each gradient, as soon as it is
    computed, if there are [`eqquant.train.Delayed`][] scales in the model.

    !!! Example

        ```python
        @eqx.filter_jit
        def step(model, state, x):
            value, grads = eqx.filter_value_and_grad(loss)(model, x)
            model, grads = eqquant.train.update_delayed(model, grads)
            params = eqx.filter(model, eqx.is_inexact_array)
            updates, state = optimizer.update(grads, state, params)
            return eqx.apply_updates(model, updates), state, value
        ```

    Optimizers, weight decay and moving averages cannot change the scales, whether they
    come before or after this: the history is stored as integers. But unless this
    function comes first, the values of the step count in a global norm of the
    gradients.

    **Arguments:**

    - `model`: any PyTree, as from [`eqquant.train.tree_compute`][].
    - `grads`: the gradient with respect to it, or to a part of it. It may have been
        summed or averaged, over devices or parts of a batch.

    **Returns:**

    The model with a history that is one step longer, and the gradients with zeros in
    place of the values of the step. A weight without a gradient keeps its history, and
    a model without delayed scales is unchanged.

    **Raises:**

    A `ValueError` if `grads` has another structure than `model`.
    """
    leaves, treedef = jtu.tree_flatten(model, is_leaf=is_low_precision)
    try:
        of_each = treedef.flatten_up_to(grads)
    except ValueError as e:
        raise ValueError(
            "`grads` should be a gradient with respect to `model`: of the same "
            f"structure, with `None` in place of some leaves. {e}"
        ) from e
    pairs = [_updated(*pair) for pair in zip(leaves, of_each, strict=True)]
    model, grads = (treedef.unflatten([pair[i] for pair in pairs]) for i in (0, 1))
    return model, grads


def _updated(w, grad):
    is_both = is_low_precision(w) and is_low_precision(grad)
    if not is_both or w.history is None or grad.history is None:
        return w, grad
    seen = grad.history.seen
    if seen is None:
        return w, grad
    # (By `tree_at`, since other leaves of a gradient may be `None`.)
    history = w.history.next(seen, w.roundings.histories)
    w = eqx.tree_at(lambda w: w.history, w, history)
    return w, eqx.tree_at(lambda g: g.history.seen, grad, jnp.zeros_like(seen))
