from collections.abc import Callable, Iterable
from typing import Any

import jax
from jaxtyping import PyTree

from .._progress import Watched
from ._calls import Calls, check_batches, tracked
from ._capture import Capture
from ._statistics import Statistics


def calibrate(
    fn: Callable[[Any, Any], Any],
    model: PyTree,
    batches: Iterable[PyTree],
    *,
    diagonal_above: int = 8192,
) -> Statistics:
    """Sums the Gram matrix `x^T x` of the inputs `x` of each weight of a model, over
    batches of data.

    `fn` is traced, and its program is run with the sums as further values. It is
    compiled once for batches of one shape. The model needs no changes: products are
    found in loops, branches, mapped and rematerialised functions. Sums are taken in
    float32.

    If elementwise functions such as a mask or a softplus change a weight before its
    products, only the diagonal of its Gram is kept. It measures how much each input
    matters.

    !!! Example

        ```python
        fn = lambda model, x: jax.vmap(model)(x)
        stats = eqquant.calibrate(fn, model, [x[:64], x[64:]])
        stats["layers.0.weight"].value
        ```

    **Arguments:**

    - `fn`: a function of the model and a batch, which applies the model.
    - `model`: any PyTree of arrays. It may be sharded, as may the batches.
    - `batches`: PyTrees of arrays, of one structure.
    - `diagonal_above`: where a product contracts more inputs than this, only the
        diagonal of its Gram is kept.

    **Returns:**

    An [`eqquant.Statistics`][].

    **Raises:**

    A `ValueError` if there are no batches, if they differ in structure, if no product
    of `fn` has an array of `model` as an operand, if some inputs are not finite, or if
    arrays are traced, as they are under `jax.jit`.
    """
    check_batches(batches)
    calls = Calls(fn, model, _compiled)
    sums = None
    for i, batch in enumerate(Watched(batches, "Calibrating")):
        step, leaves = calls(i, batch)
        if sums is None:
            shapes = calls.shapes(diagonal_above)
            sums = {slot: calls.zeros(shape) for slot, shape in shapes.items()}
        sums = step(sums, calls.leaves, leaves)
    return _statistics(calls, sums)


def _compiled(traced):
    views = tracked(traced)

    def step(sums, leaves, batch):
        sharded = traced.sharding is not None
        capture = Capture(traced.shapes, sums, traced.changing, sharded=sharded)
        capture.evaluate(traced.jaxpr, [*leaves, *batch], views)
        return capture.sums

    return jax.jit(step, donate_argnums=0, out_shardings=traced.sharding)


def _statistics(calls, sums):
    plan = calls.traced.plan
    calls.check_finite(sums)
    slots = list(sums)
    of = lambda slots: tuple(sorted((calls.paths[leaf], axes) for leaf, axes in slots))
    places = tuple(
        (calls.paths[leaf], axes, slots.index(plan.shared[leaf, axes]))
        for leaf, axes in plan.shared
    )
    return Statistics(
        tuple(sums[slot].value for slot in slots),
        tuple(sums[slot].rows for slot in slots),
        places,
        tuple((calls.paths[i], why) for i, why in plan.incomplete.items()),
        tuple(
            (of(fold.factors), of(fold.slots))
            for fold in calls.traced.folds
            if {*fold.slots} <= {*plan.shared}
        ),
    )
