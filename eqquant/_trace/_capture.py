import copy
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax import lax
from jax.extend.core import JaxprEqn
from jax.sharding import PartitionSpec
from jaxtyping import Array

from .._implicit import as_arrays, bind, opened, sizes_of_scan
from ._bodies import body_of, calls, is_kept
from ._evaluate import evaluate, Views
from ._follow import changed, follow
from ._gram_term import gram_term
from ._meeting import Meeting, meeting, products
from ._pieces import placed
from ._view import chosen, joint, View, with_view


# A leaf by its number, and the axes that are contracted.
Slot: TypeAlias = tuple[int, tuple[int, ...]]


class Sums(NamedTuple):
    """The sums over all rows so far: `value` is `*lead k k`, or `*lead k` if only the
    diagonal is kept; `rows` is `*lead`."""

    value: Array
    rows: Array


class Capture:
    """Evaluates a program, and adds the Grams of the inputs of its products to the
    sums of each slot. The sums are carried through loops and branches.

    `lanes` names a mapped axis of size two, whose two lanes run the program with
    different leaves. Then `x^T y` is summed, where `x` is the input in the first lane
    and `y` the input in the second. Both lanes use the integers of the first, such as
    the choice of an expert, so that their rows correspond. `turn` maps axes of the leaf
    to steps of the scans that choose along them: only products at these steps are
    summed."""

    def __init__(
        self,
        shapes: Sequence[Sequence[int]],
        sums: dict[Slot, Sums],
        changing: dict[int, frozenset[int]],
        lanes: str | None = None,
        turn: Mapping[int, Array] = MappingProxyType({}),
        *,
        sharded: bool = False,
    ):
        self.shapes = shapes
        self.sums = dict(sums)
        self._lanes = lanes
        self._turn = turn
        # For each leaf, the `id`s of the equations that change its numbers (see
        # `walk`).
        self._changing = changing
        # The axes of the mesh over which each device has sums of its own.
        self._manual: tuple[str, ...] = ()
        # Whether the leaves or the batches are on a mesh.
        self._sharded = sharded

    def evaluate(self, jaxpr: Any, values: Sequence[Any], views: Sequence[Views]):
        """Returns the results of a program, and their views."""
        return evaluate(jaxpr, values, views, self.apply)

    def apply(self, eqn: JaxprEqn, values: list[Any], views: list[Views]):
        """Returns the results of an equation, and their views."""
        if self._lanes is not None and eqn.primitive.name.startswith("ragged_dot"):
            values = [self._mapped(a) for a in values]
        outs, found = self._applied(eqn, values, views)
        return [*map(self._same, outs)], found

    def _applied(self, eqn, values, views):
        nothing = [()] * len(eqn.outvars)
        if not any(views):
            return bind(eqn, values), nothing
        name = eqn.primitive.name
        if name == "shard_map":
            return self._shard_map(eqn, as_arrays(eqn, values), views), nothing
        if name in calls:
            return self.evaluate(body_of(eqn), as_arrays(eqn, values), views)
        loops = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in loops:
            return loops[name](eqn, as_arrays(eqn, values), views)
        found = nothing
        for place, view in [(i, v) for i, each in enumerate(views) for v in each]:
            shape = self.shapes[view.leaf]
            if name in products:
                met = meeting(eqn, place, view, shape)
                if met is None or not met.is_known:
                    continue
                if not view.changed or self._changes(eqn, view):
                    self._add(eqn, values, met, view)
            else:
                new = follow(eqn, place, view, shape, values)
                if all(out is None for out in new) and self._changes(eqn, view):
                    new = [changed(eqn, place, view)]
                found = [with_view(a, b) for a, b in zip(found, new)]
        return bind(eqn, values), found

    def _changes(self, eqn, view):
        return id(eqn) in self._changing.get(view.leaf, ())

    def _mapped(self, a):
        # (JAX maps ragged products over all of their operands, or over none.)
        assert self._lanes is not None
        return jnp.where(lax.axis_index(self._lanes) < 0, jnp.zeros_like(a), a)

    def _same(self, a):
        # Both lanes use the integers of the first.
        if self._lanes is None or not jnp.issubdtype(a.dtype, jnp.integer):
            return a
        return lax.all_gather(a, self._lanes)[0]

    def _add(self, eqn, values, met: Meeting, view: View):
        slot = view.leaf, met.contracted
        if slot not in self.sums:
            return
        pick = next((index for index in view.at if index.many), None)
        by = met if pick is None else met._replace(over=((pick.factor,),))
        second = None
        if self._lanes is not None:
            x = values[met.other]
            second = self._mapped(lax.all_gather(x, self._lanes)[1])
            # (XLA:CPU cannot multiply a bfloat16 array with one that has an axis more.)
            values = [self._mapped(a) for a in values]
            if pick is not None:
                pick = pick._replace(value=self._mapped(pick.value))
        term = lambda diagonal: gram_term(
            eqn, values, met, diagonal, second, pick, self._sharded
        )
        add = lambda total: self._added(total, by, view, term)
        self.sums[slot] = self._if_turn(view, add, self.sums[slot])

    def _if_turn(self, view, add, total):
        if not self._turn:
            return add(total)
        indices = {index.factor.axis: index for index in view.at}
        same = [_scalar(indices[i]) == step for i, step in self._turn.items()]
        return lax.cond(jnp.all(jnp.stack(same)), add, lambda a: a, total)

    def _added(self, total: Sums, met: Meeting, view: View, term) -> Sums:
        diagonal = total.value.ndim == total.rows.ndim + 1
        shape = self.shapes[view.leaf]
        value, rows = term(diagonal)
        if met.piece is not None:
            value, rows = placed(value, rows, met.piece, shape)
            over = [dim for i, dim in enumerate(met.over) if i != met.piece.batch]
            met = met._replace(over=tuple(over))
        new = self._once(value), self._once(rows)
        others = [i for i in range(len(shape)) if i not in met.contracted]
        places = {f.axis: j for j, dim in enumerate(met.over) for f in dim}
        order = [places[i] for i in others if i in places]
        again = tuple(j for j in range(len(met.over)) if j not in order)
        leads = dict(zip(others, total.rows.shape, strict=True))
        # (The sum may have one index only, at any step.)
        indices = {i.factor.axis: i for i in view.at if not i.many}
        indices = {i: index for i, index in indices.items() if leads.get(i, 1) > 1}
        starts = [_scalar(indices[i]) if i in indices else 0 for i in others]
        sizes = [1 if i in indices else n for i, n in leads.items()]

        def added(old, a):
            rank = a.ndim - len(met.over)
            tail = range(len(met.over), a.ndim)
            a = jnp.sum(lax.transpose(a, (*order, *again, *tail)), _after(order, again))
            numbers = iter(a.shape[: len(order)])
            lead = [next(numbers) if i in places else 1 for i in others]
            inner = a.shape[len(order) :]
            a = a.reshape(*lead, *inner)
            for i, (n, size) in enumerate(zip(lead, sizes)):
                if 1 < n < size:
                    a = jnp.repeat(a, size // n, i, total_repeat_length=size)
            a = jnp.broadcast_to(a, (*sizes, *inner))
            if not indices:
                return old + a
            at = [jnp.int32(start) for start in (*starts, *[0] * rank)]
            now = lax.dynamic_slice(old, at, a.shape)
            return lax.dynamic_update_slice(old, now + a, at)

        return Sums(*map(added, total, new))

    def _once(self, a):
        # A value that is the same on several devices is summed on one of them.
        for name in self._manual:
            if name not in jax.typeof(a).manual_axis_type.varying:
                first = lax.axis_index(name) == 0
                a = jnp.where(first, a, jnp.zeros_like(a))
        return a

    # Primitives that contain programs: the sums of the leaves that enter go through.

    def _live(self, views):
        leaves = {view.leaf for each in views for view in each}
        return {slot: a for slot, a in self.sums.items() if slot[0] in leaves}

    def _inside(self, jaxpr, values, views, sums, manual=()):
        inner = copy.copy(self)
        inner.sums = dict(sums)
        inner._manual = (*self._manual, *manual)
        outs, found = inner.evaluate(jaxpr, values, views)
        return outs, found, inner.sums

    def _scan(self, eqn, values, views):
        params = eqn.params
        jaxpr = params["jaxpr"]
        consts, carried = sizes_of_scan(eqn)
        first = consts + carried
        kept = [is_kept(jaxpr, consts + i, i) for i in range(carried)]
        outside = [
            view if i < consts or i >= first or kept[i - consts] else ()
            for i, view in enumerate(views)
        ]

        def step(state, xs):
            carry, sums = state
            i, xs = xs
            views = [*outside[:first]]
            for each in outside[first:]:
                found = [chosen(view, 0, i) for view in each]
                views.append(tuple(view for view in found if view is not None))
            operands = [*values[:consts], *carry, *xs]
            outs, _, sums = self._inside(jaxpr, operands, views, sums)
            return (outs[:carried], sums), outs[carried:]

        steps = jnp.arange(params["length"], dtype=jnp.int32)
        (carry, sums), ys = lax.scan(
            step,
            (values[consts:first], self._live(outside)),
            (steps, values[first:]),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        self.sums.update(sums)
        views = outside[consts:first] + [()] * len(ys)
        return [*carry, *ys], views

    def _while(self, eqn, values, views):
        params = eqn.params
        jaxpr = params["body_jaxpr"]
        first, consts = params["cond_nconsts"], params["body_nconsts"]
        second = first + consts
        inside = [
            view if i < consts or is_kept(jaxpr, i, i - consts) else ()
            for i, view in enumerate(views[first:])
        ]

        def go_on(state):
            carry, _ = state
            operands = [*values[:first], *carry]
            unseen = [()] * len(operands)
            return self._inside(params["cond_jaxpr"], operands, unseen, {})[0][0]

        def step(state):
            carry, sums = state
            operands = [*values[first:second], *carry]
            outs, _, sums = self._inside(jaxpr, operands, inside, sums)
            return outs, sums

        state = values[second:], self._live(inside)
        carry, sums = lax.while_loop(go_on, step, state)
        self.sums.update(sums)
        return carry, inside[consts:]

    def _cond(self, eqn, values, views):
        index, *operands = values
        found = []

        def branch(jaxpr):
            def run(operands, sums):
                outs, out_views, sums = self._inside(jaxpr, operands, views[1:], sums)
                found.append(out_views)
                return outs, sums

            return run

        branches = [branch(jaxpr) for jaxpr in eqn.params["branches"]]
        outs, sums = lax.switch(index, branches, operands, self._live(views[1:]))
        self.sums.update(sums)
        return outs, [joint(each) or () for each in zip(*found, strict=True)]

    def _shard_map(self, eqn, values, views):
        if self._lanes is not None:
            raise ValueError(
                "`fn` applies weights in a `shard_map`, which `Sequential` does not "
                "follow. Pass the statistics of `eqquant.calibrate`."
            )
        params = eqn.params
        names = tuple(sorted(params["newly_manual_axes"]))
        jaxpr = params["jaxpr"]
        inner = opened(jaxpr)[0].invars
        same = [a.aval.shape == b.aval.shape for a, b in zip(eqn.invars, inner)]
        views = [each if is_same else () for each, is_same in zip(views, same)]
        sums = self._live(views)
        shapes = jtu.tree_map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), sums)

        def call(*operands):
            zeros = lambda a: lax.pcast(jnp.zeros_like(a), names, to="varying")
            new = jtu.tree_map(zeros, shapes)
            outs, _, new = self._inside(jaxpr, operands, views, new, names)
            return outs, lax.psum(new, names)

        outs, new = jax.shard_map(
            call,
            mesh=params["mesh"],
            in_specs=tuple(params["in_specs"]),
            out_specs=(list(params["out_specs"]), PartitionSpec()),
            check_vma=params["check_vma"],
            axis_names=params["newly_manual_axes"],
        )(*values)
        self.sums.update(jtu.tree_map(jnp.add, sums, new))
        return outs


def _after(order, again):
    return tuple(range(len(order), len(order) + len(again)))


def _scalar(index):
    return jnp.ravel(jnp.asarray(index.value))[index.column].astype(jnp.int32)
