import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jaxtyping import Array, Float, PyTree

from .._array import is_quantized, QuantizedArray
from .._progress import Watched
from .._trace import check_batches
from .._tree import decide
from ..formats import from_bits
from ._lora import adapted, is_lora, LoRA, matrix_of, with_magnitude
from ._low_precision import plain
from ._optimizers import optax_library


def tune(
    fn: Callable[[Any, Any], Any],
    dense: PyTree,
    quantized: PyTree,
    batches: Iterable[PyTree],
    steps: int = 24,
    *,
    learning_rate: float = 2e-3,
) -> PyTree:
    """Trains the norms and biases of a quantized model, and the scale of each row of
    its quantized weights, to reproduce the outputs of the original model. The loss is
    the divergence of the predicted distributions, so no labels are needed. This takes
    minutes, and helps every format, most of all below 4 bits.

    Codes do not change, so the backward pass only keeps packed weights. In formats with
    scales of blocks, all scales of a row are multiplied by the same number. Weights in
    formats whose scales have too few bits for that are not trained, nor are dense
    weights and embeddings.

    The optimizer is Adam, with cosine decay of the learning rate to zero.

    !!! Example

        ```python
        fn = lambda model, tokens: jax.vmap(model)(tokens)
        quantized = eqquant.tree_quantize(model, "int(3)", stats=stats)
        quantized = eqquant.train.tune(fn, model, quantized, batches)
        ```

    **Arguments:**

    - `fn`: a function of a model and a batch that returns logits along the last axis.
    - `dense`: the original model.
    - `quantized`: the same model, quantized.
    - `batches`: PyTrees of arrays, such as the batches for calibration. Each step uses
        one batch, in turn and cyclically.
    - `steps`: the number of steps.
    - `learning_rate`: the learning rate, in units of the root mean square of each
        array.

    **Returns:**

    `quantized` with trained norms, biases and scales.

    **Raises:**

    A `ValueError` if there are no batches, if there is nothing to train, or if a loss
    is not finite. A `ModuleNotFoundError` if optax is not installed.
    """
    optax = optax_library()
    check_batches(batches)
    batches = [*batches]
    if not batches:
        raise ValueError("`batches` should be some batches. Got none.")
    if steps < 1:
        raise ValueError(f"`steps` should be at least 1. Got {steps}.")
    treedef = jtu.tree_structure(quantized, is_leaf=is_quantized)
    model, spec = _with_row_norms(quantized)
    trained, frozen = eqx.partition(model, spec)
    if not jtu.tree_leaves(trained):
        raise ValueError(
            "`quantized` should have norms, biases or scales of rows to train. It has "
            "none."
        )
    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adam(optax.cosine_decay_schedule(learning_rate, steps)),
    )
    changes = jtu.tree_map(lambda a: jnp.zeros(a.shape, jnp.float32), trained)
    state = optimizer.init(changes)
    at = lambda changes: eqx.combine(jtu.tree_map(_moved, trained, changes), frozen)

    @eqx.filter_value_and_grad
    def loss(changes, model, logs, batch):
        trained, frozen, fn = model
        moved = jtu.tree_map(_moved, trained, changes)
        found = _log_probabilities(fn, eqx.combine(moved, frozen), batch)
        return jnp.mean(jnp.sum(jnp.exp(logs) * (logs - found), axis=-1))

    @eqx.filter_jit
    def step(changes, state, model, dense, batch):
        # All arrays are arguments, since closed-over arrays would become constants.
        logs = jax.lax.stop_gradient(_log_probabilities(model[2], dense, batch))
        value, gradient = loss(changes, model, logs, batch)
        with jax.numpy_dtype_promotion("standard"):  # for Optax
            updates, state = optimizer.update(gradient, state)
        return value, optax.apply_updates(changes, updates), state

    whole = trained, frozen, fn
    for i in Watched(range(steps), "Tuning"):
        batch = batches[i % len(batches)]
        value, changes, state = step(changes, state, whole, dense, batch)
        if not jnp.isfinite(value):
            raise ValueError(f"The divergence should be finite. Got {value}.")
    found = jtu.tree_leaves(at(changes), is_leaf=_is_weight)
    return jtu.tree_unflatten(treedef, map(_with_scales, found))


def _log_probabilities(fn, model, batch):
    logits = fn(model, batch).astype(jnp.float32)
    return jax.nn.log_softmax(logits, axis=-1)


def _moved(a: Float[Array, "*s"], change: Float[Array, "*s"]) -> Float[Array, "*s"]:
    """Adds a change to an array, in units of the array's root mean square."""
    wide = a.astype(jnp.float32)
    unit = jnp.sqrt(jnp.mean(jnp.square(wide)))
    return (wide + unit * change).astype(a.dtype)


def _with_row_norms(model: PyTree) -> tuple[PyTree, PyTree[bool]]:
    """Returns the model with an adapter around each quantized weight that holds the
    norms of its rows, and a tree of which arrays to train."""
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    # Arrays that could be quantized are weights or embeddings, which are not trained.
    decisions = decide(
        jtu.tree_map(plain, model, is_leaf=is_quantized),
        min_size=0,
        embeddings=True,
        is_done=lambda x: False,
        unsupported="on_call",
        known=[leaf.axis if is_quantized(leaf) else None for leaf in leaves],
    )
    model = adapted(model, map(_with_norms, leaves), None)
    new, treedef = jtu.tree_flatten(model, is_leaf=_is_weight)

    def trains(leaf, decision):
        spec = jtu.tree_map(lambda _: False, leaf)
        if is_lora(leaf):
            return eqx.tree_at(lambda w: w.magnitude, spec, True)
        if is_quantized(leaf) or not eqx.is_inexact_array(leaf):
            return spec
        return decision.format is None

    spec = [trains(*pair) for pair in zip(new, decisions, strict=True)]
    return model, jtu.tree_unflatten(treedef, spec)


def _is_weight(x):
    return is_lora(x) or is_quantized(x)


def _with_norms(w):
    """Wraps a quantized weight whose rows can be scaled in an adapter whose low-rank
    part stays zero. The adapter's magnitudes are the norms of the rows. Returns any
    other leaf as it is."""
    matrix = matrix_of(w.shape, w.axis) if is_quantized(w) and w.ndim > 1 else None
    if matrix is None:
        return w
    one = jax.ShapeDtypeStruct((*_rows(w)[:-1], 1), jnp.float32)
    if jax.eval_shape(_scaled, w, one) is None:
        return w
    a = jnp.zeros((*matrix.stack, 1, matrix.k), jnp.float32)
    b = jnp.zeros((*matrix.stack, matrix.n, 1), jnp.float32)
    return with_magnitude(LoRA(w, a, b, None, None, axis=w.axis, scale=1.0), a.dtype)


def _with_scales(w):
    """Returns the quantized weight of such an adapter, with its rows rescaled to the
    adapter's magnitudes."""
    if not is_lora(w):
        return w
    norm = jnp.sqrt(from_bits(w.norm, jnp.dtype(jnp.float32)))
    factor = w.magnitude / jnp.where(norm > 0, norm, 1)
    factor = jnp.where((norm > 0) & (factor > 0), factor, 1)
    return _scaled(w.base, factor.reshape(*_rows(w.base)[:-1], 1))


def _rows(w: QuantizedArray) -> tuple[int, ...]:
    return w.layout.shape(w.stored)


def _scaled(
    w: QuantizedArray, factors: Float[Array, "*b n 1"]
) -> QuantizedArray | None:
    rows = w.layout.to_rows(w.stored)
    found = w.layout.format.with_rows_scaled(rows, factors)
    if found is None:
        return None
    return dataclasses.replace(w, stored=w.layout.from_rows(found))
