import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeAlias

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.extend.core import ClosedJaxpr
from jax.sharding import NamedSharding, PartitionSpec, Sharding
from jaxtyping import Array, PyTree

from .._array import AbstractArrayLike
from ._capture import Slot, Sums, Views
from ._folds import Fold, folds
from ._plan import Plan, plan
from ._site import Site
from ._view import whole
from ._walk import walk


# The shape of the value of a sum, and the shape of its rows.
Shapes: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]


class Traced(NamedTuple):
    """The program of a call, whose operands are the leaves of the model, followed by
    the leaves of the batch.

    - `shapes`: the shapes of all operands.
    - `sites`: the products that each leaf of the model enters.
    - `changing`: for each leaf, the equations that change its numbers before its
        products.
    - `folds`: the leaves that can absorb a scale of the inputs of weights.
    - `sharding`: the sharding of the sums.
    """

    jaxpr: ClosedJaxpr
    shapes: Sequence[tuple[int, ...]]
    sites: Sequence[Sequence[Site]]
    changing: dict[int, frozenset[int]]
    plan: Plan
    folds: Sequence[Fold]
    sharding: Sharding | None


class Calls:
    """Calls `fn(model, batch)`, traced once for batches of one shape.

    - `leaves`, `paths`: the arrays of the model, and their paths.
    - `compile`: compiles a traced call.
    """

    def __init__(
        self,
        fn: Callable[[Any, Any], Any],
        model: PyTree,
        compile: Callable[[Traced], Any],
    ):
        dynamic, self._static = eqx.partition(model, eqx.is_array)
        self._fn = fn
        self._dynamic = jtu.tree_map(jnp.asarray, dynamic)  # may be NumPy arrays
        self._compile = compile
        self._compiled: dict[Any, Any] = {}
        self._structure: Any = None
        self._traced: Traced | None = None
        self.leaves: list[Array] = jtu.tree_leaves(self._dynamic)
        if not self.leaves:
            raise ValueError(
                "`model` should have arrays. Got none among leaves of the types "
                f"{sorted({type(x).__name__ for x in jtu.tree_leaves(model)})}."
            )
        _check_arrays("model", self.leaves)
        found, _ = jtu.tree_flatten_with_path(self._dynamic)
        self.paths = [jtu.keystr(path, simple=True, separator=".") for path, _ in found]
        twice = [path for path, number in Counter(self.paths).items() if number > 1]
        if twice:
            raise ValueError(
                "`model` should have arrays with distinct paths, by which statistics "
                f"are found. Got several arrays at {', '.join(map(repr, twice))}."
            )

    @property
    def traced(self) -> Traced:
        """The first call. Raises a `ValueError` if there was none."""
        if self._traced is None:
            raise ValueError("`batches` should have at least one batch. Got none.")
        return self._traced

    def __call__(self, i: int, batch: PyTree) -> tuple[Any, list[Array]]:
        """Returns the compiled call for batch number `i`, and the arrays of the batch.
        Raises a `ValueError` if the batch has another structure than the first, if no
        product has an array of the model as an operand, or if the products differ from
        the products of the first batch."""
        batch = jtu.tree_map(
            lambda x: jnp.asarray(x) if eqx.is_array_like(x) else x, batch
        )
        arrays, static = eqx.partition(batch, eqx.is_array)
        _check_arrays("batches", jtu.tree_leaves(arrays))
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
        if key not in self._compiled:
            self._compiled[key] = self._compile(self._trace(arrays, static))
        return self._compiled[key], leaves

    def _trace(self, arrays, static):
        def call(dynamic, arrays):
            model = eqx.combine(dynamic, self._static)
            out = self._fn(model, eqx.combine(arrays, static))
            return eqx.filter(out, eqx.is_array)

        jaxpr = jax.make_jaxpr(call)(self._dynamic, arrays)
        operands = [*self.leaves, *jtu.tree_leaves(arrays)]
        shapes = [x.shape for x in operands]
        number = len(self.leaves)
        argument = [int(i >= number) for i in range(len(shapes))]
        walked = walk(jaxpr, shapes, argument)
        new = plan(walked, number)
        if not new.shared:
            raise ValueError(
                "`fn` should apply `model`: no product in it has an array of `model` "
                "as an operand. Got a function that uses "
                + _used(self.paths, walked.others, new.incomplete)
                + self._replaced()
            )
        found = folds(jaxpr, shapes, number)
        place = _sharding(operands)
        sites = [
            walked.changed[i] if i in new.changed else walked.sites[i]
            for i in range(number)
        ]
        changing = {leaf: frozenset(walked.changing[leaf]) for leaf in new.changed}
        traced = Traced(jaxpr, shapes, sites, changing, new, found, place)
        if self._traced is None:
            self._traced = traced
        if new != self._traced.plan:
            raise ValueError(
                "`fn` should multiply the same arrays with the same inputs for all "
                "batches. It does not for batches of these shapes: "
                f"{shapes[number:]}."
            )
        return traced

    def _replaced(self):
        static, dynamic = self._static, self._dynamic
        is_like = lambda x: isinstance(x, AbstractArrayLike)
        leaves = jtu.tree_leaves(eqx.combine(dynamic, static), is_leaf=is_like)
        kinds = sorted({type(x).__name__ for x in leaves if is_like(x)})
        if not kinds:
            return ""
        return f" It has a {' and a '.join(kinds)} for some weights: pass arrays."

    def shapes(self, diagonal_above: int) -> dict[Slot, Shapes]:
        """Returns the shapes of all sums. Products that contract more inputs than
        `diagonal_above` have diagonals only."""
        shapes = {}
        for slot, lead in self.traced.plan.lead.items():
            leaf, contracted = slot
            k = math.prod(self.leaves[leaf].shape[i] for i in contracted)
            changed = leaf in self.traced.plan.changed
            inner = (k,) if changed or k > diagonal_above else (k, k)
            shapes[slot] = (*lead, *inner), lead
        return shapes

    def zeros(self, shapes: Shapes) -> Sums:
        """Returns sums of no rows."""
        make = lambda shape: np.zeros(shape, np.float32)
        return Sums(*jax.device_put(list(map(make, shapes)), self.traced.sharding))

    def places(self, slot: Slot) -> list[tuple[str, tuple[int, ...]]]:
        """Returns the path and the contracted axes of each leaf that shares the sum of
        a slot."""
        return [
            (self.paths[leaf], axes)
            for (leaf, axes), owner in self.traced.plan.shared.items()
            if owner == slot
        ]

    def check_finite(self, sums: dict[Slot, Sums]) -> None:
        """Raises a `ValueError` that names the leaves whose inputs are not finite."""
        bad = [
            path
            for slot, (value, _) in sums.items()
            if not bool(jnp.all(jnp.isfinite(value)))
            for path, _ in self.places(slot)
        ]
        if bad:
            raise ValueError(
                "`batches` and `model` should give finite inputs, whose squares do not "
                f"overflow. Those of {bad} are NaN or infinite."
            )


def tracked(traced: Traced) -> list[Views]:
    """Returns the views of all operands: the leaves that have sums are views."""
    leaves = {leaf for leaf, _ in traced.plan.lead}
    return [
        (whole(i, shape),) if i in leaves else ()
        for i, shape in enumerate(traced.shapes)
    ]


def check_batches(batches: Any) -> None:
    """Raises a `ValueError` if `batches` is a single batch, or cannot be iterated."""
    if isinstance(batches, jax.Array | np.ndarray):
        got = f"one array, of shape {batches.shape}"
    elif isinstance(batches, dict):
        got = f"one dict, of {list(batches)}"
    elif not isinstance(batches, Iterable):
        got = repr(batches)
    else:
        return
    raise ValueError(
        f"`batches` should be an iterable of batches. Got {got}: pass `[batch]`."
    )


def _check_arrays(name, arrays):
    for x in arrays:
        if isinstance(x, Tracer):
            raise ValueError(
                f"`{name}` should have arrays with values: inputs are measured, so "
                "calibrate outside of `jax.jit` and other transformations. Got a "
                f"traced array of shape {x.shape}."
            )


def _used(paths, others, incomplete):
    found = [path for i, path in enumerate(paths) if others[i] or i in incomplete]
    reasons = "; ".join(f"of `{paths[i]}`, {why}" for i, why in incomplete.items())
    end = f": {reasons}." if reasons else "."
    return f"{found} in other ways{end}" if found else "none of them."


def _sharding(operands):
    # The sums are replicated over the mesh of the model or of the batch.
    for x in operands:
        if isinstance(x.sharding, NamedSharding):
            return NamedSharding(x.sharding.mesh, PartitionSpec())
    return None
