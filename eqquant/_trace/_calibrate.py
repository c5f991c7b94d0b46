import math
from collections.abc import Callable, Iterable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from ._capture import Capture, Sums
from ._plan import Plan, plan
from ._progress import watched
from ._statistics import Statistics
from ._uses import walk
from ._view import whole


def calibrate(
    fn: Callable[[Any, Any], Any],
    model: PyTree,
    batches: Iterable[PyTree],
    *,
    diagonal_above: int = 8192,
) -> Statistics:
    """Sums what each weight of a model is multiplied with, over batches of data: the
    Gram matrix `x^T x` of the inputs `x` of each matrix.

    `fn` is traced, and its program is run with the sums as further values, compiled
    once for batches of one shape. The model needs no changes: products are found in
    loops, branches, mapped and rematerialised functions. Sums are taken in float32.

    If the numbers of a weight are changed one by one before its products, such as by a
    mask or a softplus, only the diagonal of its Gram is kept. It tells how much each
    input matters.

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
    of `fn` has an array of `model` as an operand, or if some inputs are not finite.
    """
    if isinstance(batches, jax.Array | np.ndarray):
        raise ValueError(
            f"`batches` should be an iterable of batches. Got one array, of shape "
            f"{batches.shape}: pass `[batch]`."
        )
    dynamic, static = eqx.partition(model, eqx.is_array)
    dynamic = jtu.tree_map(jnp.asarray, dynamic)  # of NumPy's
    run = _Run(fn, dynamic, static, diagonal_above)
    for i, batch in enumerate(watched(batches, "Calibrating")):
        run.add(i, batch)
    return run.statistics()


class _Run:
    def __init__(self, fn, dynamic, static, diagonal_above):
        self._fn, self._dynamic, self._static = fn, dynamic, static
        self._leaves = jtu.tree_leaves(dynamic)
        found, _ = jtu.tree_flatten_with_path(dynamic)
        self._paths = [
            jtu.keystr(path, simple=True, separator=".") for path, _ in found
        ]
        self._diagonal_above = diagonal_above
        self._programs = {}
        self._structure: Any = None
        self._plan: Plan | None = None
        self._sums: Any = None

    def add(self, i, batch):
        batch = jtu.tree_map(
            lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x, batch
        )
        arrays, static = eqx.partition(batch, eqx.is_array)
        structure = jtu.tree_structure(batch)
        if self._structure is None:
            self._structure = structure
        if structure != self._structure:
            raise ValueError(
                "`batches` should have one structure. Got "
                f"{self._structure} at first, and {structure} as number {i}."
            )
        leaves = jtu.tree_leaves(arrays)
        key = (*((x.shape, x.dtype) for x in leaves), *jtu.tree_leaves(static))
        if key not in self._programs:
            self._programs[key] = self._program(arrays, static)
        self._sums = self._programs[key](self._sums, self._leaves, leaves)

    def _program(self, arrays, static):
        def call(dynamic, arrays):
            model = eqx.combine(dynamic, self._static)
            out = self._fn(model, eqx.combine(arrays, static))
            return eqx.filter(out, eqx.is_array)

        jaxpr = jax.make_jaxpr(call)(self._dynamic, arrays)
        operands = [*self._leaves, *jtu.tree_leaves(arrays)]
        shapes = [x.shape for x in operands]
        number = len(self._leaves)
        argument = [int(i >= number) for i in range(len(shapes))]
        walked = walk(jaxpr, shapes, argument)
        new = plan(walked, number)
        if not new.shared:
            raise ValueError(
                "`fn` should apply `model`: no product in it has an array of `model` "
                "as an operand. Got a function that uses "
                + _used(self._paths, walked.others)
            )
        place = _sharding(operands)
        if self._plan is None:
            self._plan, self._sums = new, self._zeros(new, place)
        if new != self._plan:
            raise ValueError(
                "`fn` should multiply the same arrays with the same inputs for all "
                "batches. It does not for batches of these shapes: "
                f"{shapes[number:]}."
            )
        tracked = {leaf for leaf, _ in new.lead}
        changing = {leaf: frozenset(walked.changing[leaf]) for leaf in new.changed}

        def step(sums, leaves, batch):
            capture = Capture(shapes, sums, changing)
            ours = lambda i, shape: (whole(i, shape),) if i in tracked else ()
            views = [ours(i, shape) for i, shape in enumerate(shapes)]
            capture.evaluate(jaxpr, [*leaves, *batch], views)
            return capture.sums

        return jax.jit(step, donate_argnums=0, out_shardings=place)

    def _zeros(self, plan, place):
        zeros = {}
        for slot, lead in plan.lead.items():
            leaf, contracted = slot
            k = math.prod(self._leaves[leaf].shape[i] for i in contracted)
            diagonal = k > self._diagonal_above or leaf in plan.changed
            inner = (k,) if diagonal else (k, k)
            make = lambda *shape: jax.device_put(np.zeros(shape, np.float32), place)
            zeros[slot] = Sums(make(*lead, *inner), make(*lead))
        return zeros

    def statistics(self):
        if self._plan is None:
            raise ValueError("`batches` should have at least one batch. Got none.")
        slots = list(self._sums)
        places = tuple(
            (self._paths[leaf], axes, slots.index(self._plan.shared[leaf, axes]))
            for leaf, axes in self._plan.shared
        )
        finite = [bool(jnp.all(jnp.isfinite(self._sums[slot].value))) for slot in slots]
        bad = [path for path, _, i in places if not finite[i]]
        if bad:
            raise ValueError(
                "`batches` and `model` should give finite inputs, whose squares do not "
                f"overflow. Those of {bad} are NaN or infinite."
            )
        return Statistics(
            tuple(self._sums[slot].value for slot in slots),
            tuple(self._sums[slot].rows for slot in slots),
            places,
            tuple((self._paths[i], why) for i, why in self._plan.incomplete.items()),
        )


def _used(paths, others):
    found = [path for path, names in zip(paths, others) if names]
    return f"{found} in other ways." if found else "none of them."


def _sharding(operands):
    # The sums are on all devices of the mesh that the model or the batch is on.
    for x in operands:
        if isinstance(x.sharding, NamedSharding):
            return NamedSharding(x.sharding.mesh, PartitionSpec())
    return None
