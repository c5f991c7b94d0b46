import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Array, Float, PyTree

from ._calls import Calls, check_batches, Traced, tracked
from ._capture import Capture, Lanes, Slot, Sums, Turn
from ._statistics import Gram
from ._uses import Site, Step


class Sequential(eqx.Module):
    """Statistics that are taken while a model is quantized: one weight after another,
    in the order in which `fn` uses them. What a weight is multiplied with then comes
    from the weights before it as they are quantized, so it can make up for their
    errors. Pass this to [`eqquant.tree_quantize`][] in place of what
    [`eqquant.calibrate`][] returns.

    For each group of weights that share their inputs, all batches go through the model
    twice: as it was, and as it is quantized so far. The layers of a stack, in a scan,
    come one after another, too. (Of the experts of a layer, each meets the inputs that
    it met in the model as it was. Weights in a `shard_map` are an error.)

    !!! Example

        ```python
        fn = lambda model, x: jax.vmap(model)(x)
        model = eqquant.tree_quantize(
            model, "int4", stats=eqquant.Sequential(fn, batches)
        )
        ```

    - `fn`, `batches`, `diagonal_above`: as the arguments of [`eqquant.calibrate`][].
    - `mix`: which products a weight should come near to. At 1, those of the model as it
        was. At 0, its own with the inputs that it meets now. What is in between is
        safer where there are few rows.

    ??? cite "Reference"

        GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration. Li et
        al., 2025.
    """

    fn: Callable[[Any, Any], Any]
    batches: list[PyTree] = eqx.field(converter=lambda x: _as_list(x))
    mix: float = eqx.field(default=0.5, static=True, kw_only=True)
    diagonal_above: int = eqx.field(default=8192, static=True, kw_only=True)

    def __check_init__(self):
        if not 0 <= self.mix <= 1:
            raise ValueError(f"`mix` should be between 0 and 1. Got {self.mix}.")


def _as_list(batches: Iterable[PyTree]) -> list[PyTree]:
    check_batches(batches)
    return list(batches)


class Group(NamedTuple):
    """Weights that share their inputs, whose turn is the same.

    - `slot`: that of their sums.
    - `steps`: the indices along leading axes of the weights, along which scans choose.
    - `weights`: their paths, and the axes that are contracted.
    """

    slot: Slot
    steps: tuple[int, ...]
    weights: list[tuple[str, tuple[int, ...]]]

    @property
    def index(self) -> tuple[slice, ...]:
        """What of each weight belongs to the group. Axes of `steps` become of size
        one."""
        return tuple(slice(i, i + 1) for i in self.steps)


class InSequence:
    """A model whose weights are being quantized, one group after another.

    - `contracted`: the axes along which products contract each weight, by its path.
    - `groups`: the groups, in the order of their turns.
    """

    def __init__(self, sequential: Sequential, model: PyTree, paths: Collection[str]):
        self._batches = sequential.batches
        self._diagonal_above = sequential.diagonal_above
        self._calls = Calls(sequential.fn, model, self._compiled)
        for i, batch in enumerate(self._batches):
            self._calls(i, batch)
        traced = self._calls.traced
        self._shapes = self._calls.shapes(self._diagonal_above)
        each = enumerate(zip(self._calls.paths, self._calls.leaves))
        self._new = {i: leaf for i, (path, leaf) in each if path in paths}
        self.contracted: dict[str, list[tuple[int, ...]]] = {}
        for leaf, axes in traced.plan.shared:
            self.contracted.setdefault(self._calls.paths[leaf], []).append(axes)
        found = [
            (_order(traced, slot, steps), slot, steps)
            for slot in self._shapes
            for steps in np.ndindex(*_sizes(traced, slot))
        ]
        self.groups = []
        for _, slot, steps in sorted(found):
            weights = [(p, axes) for p, axes in self._calls.places(slot) if p in paths]
            if weights:
                self.groups.append(Group(slot, steps, weights))

    def measure(self, group: Group) -> tuple[Gram, Gram]:
        """The Gram of a group, of the model as it is quantized so far; and one with the
        sum of `x^T y`, where `x` are the inputs in the model as it was, and `y` these.
        """
        sizes = _sizes(self._calls.traced, group.slot)
        turns = dict.fromkeys(self._shapes, np.int32(-1))
        turns[group.slot] = np.int32(
            np.ravel_multi_index((0, *group.steps), (1, *sizes))
        )
        twice = lambda a: jnp.stack([a, a])
        sums = {
            shapes: jtu.tree_map(twice, self._calls.zeros(shapes))
            for shapes in self._shapes.values()
        }
        for i, batch in enumerate(self._batches):
            run, leaves = self._calls(i, batch)
            sums = run(sums, turns, self._calls.leaves, self._new, leaves)
        found = sums[self._shapes[group.slot]]
        value, rows = (a[(slice(None), *group.index)] for a in found)
        self._calls.check_finite({group.slot: Sums(value, rows)})
        contracted = group.weights[0][1]
        cross, gram = (Gram(value[i], rows[i], contracted) for i in range(2))
        return gram, cross

    def put(self, path: str, group: Group, numbers: Float[Array, "..."]) -> None:
        """Sets what a weight, or a step of it, is from now on."""
        leaf = self._calls.paths.index(path)
        self._new[leaf] = self._new[leaf].at[group.index].set(numbers)

    def _compiled(self, traced):
        views = tracked(traced)
        shapes = self._calls.shapes(self._diagonal_above)
        axes = {slot: _axes(traced, slot) for slot in shapes}

        def run(sums, turns, old, new, batch):
            turns = {
                slot: Turn(shapes[slot], axes[slot], turn)
                for slot, turn in turns.items()
            }

            def lane(sums, leaves):
                lanes = Lanes("eqquant lane", turns)
                sharded = traced.sharding is not None
                capture = Capture(
                    traced.shapes, sums, traced.changing, lanes, sharded=sharded
                )
                capture.evaluate(traced.jaxpr, [*leaves, *batch], views)
                return capture.sums

            leaves = [
                jnp.stack([a, new[i]]) if i in new else a for i, a in enumerate(old)
            ]
            mapped = [0 if i in new else None for i in range(len(old))]
            each = jax.vmap(lane, (0, mapped), axis_name="eqquant lane")
            return each(sums, leaves)

        return jax.jit(run, donate_argnums=0, out_shardings=traced.sharding)


def _sites(traced: Traced, slot: Slot) -> Sequence[Site]:
    leaf, contracted = slot
    sites = traced.sites[leaf]
    return [site for site in sites if site.product.contracted == contracted]


def _axes(traced: Traced, slot: Slot) -> tuple[int, ...]:
    # The leading axes along which scans choose a step, wherever the weight is used.
    shape = traced.shapes[slot[0]]
    each = [
        {
            index.factor.axis
            for index in site.at
            if isinstance(index.value, Step)
            and index.factor.size == shape[index.factor.axis]
        }
        for site in _sites(traced, slot)
    ]
    chosen = set.intersection(*each)
    leading = itertools.takewhile(lambda i: i in chosen, range(len(shape)))
    return tuple(leading)


def _sizes(traced: Traced, slot: Slot) -> list[int]:
    return [traced.shapes[slot[0]][i] for i in _axes(traced, slot)]


def _order(traced: Traced, slot: Slot, steps: Sequence[int]) -> list[int]:
    # Orders as the program runs: within a scan, by its steps first.
    site = _sites(traced, slot)[0]
    step_of = {index.value: index.factor.axis for index in site.at}
    order = []
    for label in site.inside:
        if not isinstance(label, Step):
            continue
        axis = step_of.get(label)
        if axis is not None and axis < len(steps):
            first = min(
                s.order for each in traced.sites for s in each if label in s.inside
            )
            order += [first, -steps[axis] if label.reverse else steps[axis]]
    return [*order, site.order]
