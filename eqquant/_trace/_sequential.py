import functools as ft
import itertools
from collections.abc import Callable, Collection, Iterable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax import lax
from jaxtyping import Array, Float, PyTree

from ._calls import Calls, check_batches, Traced
from ._capture import Slot
from ._program import known_steps, Program
from ._segment import segment
from ._site import Step
from ._statistics import Gram
from ._store import places, Store


class Sequential(eqx.Module):
    """Statistics that are taken while a model is quantized: one weight after another,
    in the order in which `fn` uses them. The inputs of a weight then include the errors
    of the quantized weights before it, so it can make up for these errors. Pass this to
    [`eqquant.tree_quantize`][] in place of the result of [`eqquant.calibrate`][].

    All batches go through the original model and the model as quantized so far, once,
    from one group of weights that share their inputs to the next. Intermediate values
    are kept. The layers of a stack, in a scan, come one after another, too. (Each
    expert of a layer meets the inputs that it met in the original model. Weights in a
    `shard_map` are an error.)

    Equations between the first and the last use of a weight run twice. A loop with
    several groups of weights in it, such as the steps of a recurrent network, runs once
    for each group.

    For all batches together, the arrays that the rest of the model needs are kept: the
    residual stream, and the operands of the next product. There are two of each, so a
    model of width `n` whose widest layer has `k` inputs takes `2 * (n + k)` numbers for
    each token.

    !!! Example

        ```python
        fn = lambda model, x: jax.vmap(model)(x)
        model = eqquant.tree_quantize(
            model, "int4", stats=eqquant.Sequential(fn, batches)
        )
        ```

    - `fn`, `batches`, `diagonal_above`: as the arguments of [`eqquant.calibrate`][].
    - `mix`: the target of each weight's products. At 1, the products of the original
        model. At 0, the weight's own products with its current inputs. Values in
        between are safer if there are few rows.
    - `keep`: where arrays are kept: on the `"device"`, in the memory of the `"host"`,
        or on `"disk"`, in files of a temporary folder.
    - `keep_dtype`: the dtype in which floating-point numbers are kept, such as
        `jnp.bfloat16`, if it is shorter than their own.

    ??? cite "Reference"

        GPTAQ: Efficient Finetuning-Free Quantization for Asymmetric Calibration. Li et
        al., 2025.
    """

    fn: Callable[[Any, Any], Any]
    batches: list[PyTree] = eqx.field(converter=lambda x: _as_list(x))
    mix: float = eqx.field(default=0.5, static=True, kw_only=True)
    diagonal_above: int = eqx.field(default=8192, static=True, kw_only=True)
    keep: str = eqx.field(default="device", static=True, kw_only=True)
    keep_dtype: Any = eqx.field(default=None, static=True, kw_only=True)

    def __check_init__(self):
        if not 0 <= self.mix <= 1:
            raise ValueError(f"`mix` should be between 0 and 1. Got {self.mix}.")
        if self.keep not in places:
            raise ValueError(f"`keep` should be one of {places}. Got {self.keep!r}.")
        dtype = self.keep_dtype
        if dtype is not None and not jnp.issubdtype(dtype, jnp.floating):
            raise ValueError(
                "`keep_dtype` should be a floating-point type, such as "
                f"`jnp.bfloat16`, or None. Got {dtype}."
            )


def _as_list(batches: Iterable[PyTree]) -> list[PyTree]:
    check_batches(batches)
    return list(batches)


class Group(NamedTuple):
    """Weights that share their inputs, and have the same turn.

    - `slot`: one of them, and the axes that are contracted.
    - `sums`: the slot whose sums they share.
    - `steps`: the indices along leading axes of the weights that scans choose.
    - `weights`: their paths, and the axes that are contracted.
    """

    slot: Slot
    sums: Slot
    steps: tuple[int, ...]
    weights: list[tuple[str, tuple[int, ...]]]

    @property
    def index(self) -> tuple[slice, ...]:
        """The index of the part of each weight that belongs to the group. Axes of
        `steps` become of size one."""
        return tuple(slice(i, i + 1) for i in self.steps)

    @property
    def name(self) -> str:
        """The path of the first weight, and its step."""
        return "".join([self.weights[0][0], *(f"[{i}]" for i in self.steps)])

    @property
    def chosen(self) -> dict[int, int]:
        """Maps axes to their steps."""
        return dict(enumerate(self.steps))


class InSequence:
    """A model whose weights are being quantized, one group after another.

    - `contracted`: the axes along which products contract each weight, by its path.
    - `groups`: the groups, in the order of their turns.
    - `segments`: the segments compiled so far.
    """

    def __init__(self, sequential: Sequential, model: PyTree, paths: Collection[str]):
        self._keep_dtype = sequential.keep_dtype
        self.segments: dict[Any, Any] = {}
        self._calls = Calls(sequential.fn, model, self._program)
        each = enumerate(self._calls.paths)
        self._number = {path: i for i, path in each if path in paths}
        self._old = self._calls.leaves
        self._new = list(self._old)
        store = Store(sequential.keep)
        self._runs = [
            _Run(*self._calls(i, batch), store)
            for i, batch in enumerate(sequential.batches)
        ]
        traced = self._calls.traced
        self._shapes = self._calls.shapes(sequential.diagonal_above)
        self.contracted: dict[str, list[tuple[int, ...]]] = {}
        for leaf, axes in traced.plan.shared:
            self.contracted.setdefault(self._calls.paths[leaf], []).append(axes)
        self.groups = sorted(self._found(traced), key=self._order)

    @property
    def again(self) -> list[tuple[str, str]]:
        """The paths of weights at whose turn some equations run that run again later,
        each with the reason."""
        found, program = {}, self._runs[0].program
        for group in self.groups:
            sites = program.sites(group.slot, group.chosen)
            if len({site.place for site in sites}) > 1:
                found[group.weights[0][0]] = "it is used in several places"
            elif any(site.inside for site in sites):
                what = program.name(sites[0].place)
                found[group.weights[0][0]] = f"it is used in a `{what}`"
        return list(found.items())

    def measure(
        self, group: Group, note: Callable[[str], None] = lambda _: None
    ) -> tuple[Gram, Gram]:
        """Returns the Gram of a group in the model as quantized so far, and one with
        the sum of `x^T y`, where `x` are the inputs in the original model, and `y` the
        current ones. Calls `note` before other steps that take time.
        """
        steps = len(group.steps)
        value, rows = self._shapes[group.sums]
        one = lambda shape: (*(1,) * steps, *shape[steps:])
        twice = lambda a: jnp.stack([a, a])
        sums = jtu.tree_map(twice, self._calls.zeros((one(value), one(rows))))
        segments = {}
        for run in self._runs:
            place = self._place(run.program, group)
            if place < run.place:
                run.restart()
            key = id(run.program), run.place
            if key not in segments:
                segments[key] = self._segment(run, place, group, note)
            found = segments[key]
            values = list(run.values(found.inputs, self._old, self._new))
            turn = [group.steps[i] for i in found.turn]
            sums, outs = self.segments[found.key](sums, values, turn)
            run.advance(place, found.cut.outs, outs)
        self._calls.check_finite({group.sums: sums})
        contracted = group.slot[1]
        cross, gram = (Gram(sums.value[i], sums.rows[i], contracted) for i in range(2))
        return gram, cross

    def put(self, path: str, group: Group, numbers: Float[Array, "..."]) -> None:
        """Sets the current value of a weight, or of a step of it."""
        leaf = self._number[path]
        old, new = self._old[leaf], self._new[leaf]
        if group.steps:
            at = (*group.steps, *[0] * (old.ndim - len(group.steps)))
            at = tuple(map(jnp.int32, at))
            self._new[leaf] = _set(jnp.copy(old) if new is old else new, numbers, at)
        else:
            self._new[leaf] = old.at[()].set(numbers)
        for run in self._runs:
            if run.program.is_stale(leaf, group.chosen, run.place):
                run.restart()

    def _program(self, traced):
        return Program(traced, self._number.values())

    def _found(self, traced):
        for sums in self._shapes:
            each = self._calls.places(sums)
            weights = [(p, axes) for p, axes in each if p in self._number]
            if weights:
                path, contracted = weights[0]
                slot = self._number[path], contracted
                axes = _axes(traced, slot)
                for steps in np.ndindex(*(traced.shapes[slot[0]][i] for i in axes)):
                    yield Group(slot, sums, steps, weights)

    def _order(self, group):
        program = self._runs[0].program
        return min(program.order(slot, group.chosen) for slot in self._slots(group))

    def _slots(self, group):
        return [(self._number[path], axes) for path, axes in group.weights]

    def _place(self, program, group):
        each = [program.sites(slot, group.chosen) for slot in self._slots(group)]
        return min(site.place for sites in each for site in sites)

    def _segment(self, run, place, group, note):
        program, chosen = run.program, group.chosen
        sites = program.sites(group.slot, chosen)
        cut = program.cut(run.place, place, sites)
        turn = {i for site in sites for i in chosen if i not in known_steps(site.at)}
        found = segment(program, cut, group.slot, tuple(sorted(turn)))
        if found.key not in self.segments:
            note("compiling")
            self.segments[found.key] = found.compiled(
                self._keep_dtype, self._calls.traced.sharding
            )
        return found


class _Run:
    # A batch on its way through the program, up to the current place.

    def __init__(self, program, batch, store):
        self.program = program
        self.place = 0
        self._batch = batch
        self._store = store
        self._kept = {}

    def restart(self):
        self.place = 0
        self._kept = {}

    def values(self, inputs, old, new):
        numbers, leaves = self.program.numbers, len(old)
        batch = leaves + len(self._batch)
        for v in inputs:
            if v in self._kept:
                yield self._store.get(self._kept[v])
            elif v in self.program.constants:
                yield self.program.constants[v]
            elif numbers[v] >= batch:
                yield np.uint32(numbers[v] - batch)
            elif numbers[v] >= leaves:
                yield self._batch[numbers[v] - leaves]
            elif v in self.program.double:
                yield old[numbers[v]], new[numbers[v]]
            else:
                yield old[numbers[v]]

    def advance(self, place, outs, values):
        kept = {v: a for v, a in self._kept.items() if self.program.is_needed(v, place)}
        new = {v: self._store.put(a) for v, a in zip(outs, values, strict=True)}
        self.place, self._kept = place, kept | new


@ft.partial(jax.jit, donate_argnums=0)
def _set(a, part, at):
    return lax.dynamic_update_slice(a, part.astype(a.dtype), at)


def _axes(traced: Traced, slot: Slot) -> tuple[int, ...]:
    # The leading axes along which scans choose a step at every use of the weight.
    shape = traced.shapes[slot[0]]
    each = [
        {
            index.factor.axis
            for index in site.at
            if isinstance(index.value, Step)
            and index.factor.size == shape[index.factor.axis]
        }
        for site in traced.sites[slot[0]]
        if site.product.contracted == slot[1]
    ]
    chosen = set.intersection(*each)
    leading = itertools.takewhile(lambda i: i in chosen, range(len(shape)))
    return tuple(leading)
