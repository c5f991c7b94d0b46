from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jax.extend.core import JaxprEqn, Literal, Var

from ._calls import Traced
from ._capture import Slot
from ._site import Known, Site, Step
from ._unrolled import unrolled
from ._view import Index
from ._walk import walk


class Cut(NamedTuple):
    """The part of a program that runs at one turn.

    - `weights`: the equations that depend on the leaves of the model alone.
    - `eqns`: the others, in order.
    - `views`: the places in `eqns` where the leaf is followed, up to the products that
        are summed.
    - `outs`: their variables that are needed later.
    """

    weights: list[JaxprEqn]
    eqns: list[JaxprEqn]
    views: frozenset[int]
    outs: list[Var]


class Program:
    """A traced call as one list of equations, cut where weights are used.

    Values that depend on the leaves of the model alone are evaluated in each piece that
    needs them, from the current weights. So are equations that choose a part of a leaf.
    All others are evaluated once, in order. The exceptions are equations between the
    first and the last product of a weight: these are evaluated up to the last product
    before the weight's turn, and again after it. So is a loop that contains products of
    several weights.

    - `leaves`: the variables of the arrays of the model.
    - `numbers`: maps each variable to the number of its operand. The arrays of the
        model come first, then the arrays of the batch and the indices of the steps of
        scans.
    - `constants`: the values of other variables that no equation computes.
    - `free`: the variables that depend on the leaves of the model alone.
    - `double`: the variables that have two values, since they depend on leaves that are
        quantized.
    - `changing`: for each leaf, the equations that change its numbers before its
        products.
    """

    def __init__(self, traced: Traced, new: Collection[int]):
        """`new` are the leaves that are quantized."""
        number, first = len(traced.sites), len(traced.shapes)
        lengths = {
            leaf: [
                index.factor.size
                for site in traced.sites[leaf]
                for index in site.at
                if isinstance(index.value, Step)
            ]
            for leaf in new
        }
        steps = max((n for each in lengths.values() for n in each), default=0)
        stacks = {leaf for leaf in new if lengths[leaf]}
        flat = unrolled(traced.jaxpr, traced.shapes, stacks, steps)
        argument = [int(i >= number) for i in range(first)]
        walked = walk(flat, traced.shapes, argument, steps)
        operands = flat.jaxpr.invars
        self.leaves = operands[:number]
        self.numbers = {v: i for i, v in enumerate(operands)}
        self.constants = dict(zip(flat.jaxpr.constvars, flat.consts, strict=True))
        changed = traced.plan.changed
        self.changing = {i: frozenset(walked.changing[i]) for i in changed}
        self._eqns = flat.jaxpr.eqns
        self._sites = {
            leaf: (walked.changed if leaf in changed else walked.sites)[leaf]
            for leaf in new
        }
        self._views = walked.views
        self.free = {*self.leaves, *operands[first:], *self.constants}
        self.double = {self.leaves[i] for i in new}
        self._classify({*new})
        self._schedule()

    def sites(self, slot: Slot, steps: Mapping[int, int]) -> list[Site]:
        """Returns the products of a slot for which these steps were chosen along axes
        of the leaf."""
        leaf, contracted = slot
        return [
            site
            for site in self._sites[leaf]
            if site.product.contracted == contracted
            and site.is_known
            and _agree(known_steps(site.at), steps)
        ]

    def order(self, slot: Slot, steps: Mapping[int, int]) -> list[int]:
        """Returns a sort key in the order of execution: steps of a scan come first."""
        site = min(self.sites(slot, steps), key=lambda site: site.order)
        step_of = {index.value: index.factor.axis for index in site.at}
        order = [site.place]
        for label in site.inside:
            axis = step_of.get(label)
            if isinstance(label, Step) and axis is not None and axis in steps:
                sites = [s for each in self._sites.values() for s in each]
                first = min(s.order for s in sites if label in s.inside)
                order += [first, -steps[axis] if label.reverse else steps[axis]]
        return [*order, site.order]

    def cut(self, start: int, first: int, sites: Sequence[Site]) -> Cut:
        """Cuts out the equations from place `start` on that are needed to sum these
        products, none of which is before the place `first`. Equations from `first` on
        run again later."""
        places = {site.place for site in sites}
        chosen = [i for i in range(start, first) if self._is_run(i)]
        outs = [
            v for i in chosen for v in self._eqns[i].outvars if self.is_needed(v, first)
        ]
        wanted = set()
        for i in range(max(places), first - 1, -1):
            eqn = self._eqns[i]
            if i in places or (self._is_run(i) and wanted.intersection(eqn.outvars)):
                chosen.append(i)
                _, read = self._late([i])
                wanted.update(read)
        late, _ = self._late(chosen)
        of_leaves = sorted(late & self._of_leaves)
        order = sorted({*chosen} | (late - self._of_leaves))
        eqns = [self._eqns[i] for i in order]
        views = frozenset(j for j, i in enumerate(order) if i in places or i in late)
        return Cut([self._eqns[i] for i in of_leaves], eqns, views, outs)

    def name(self, place: int) -> str:
        """Returns the name of an equation's primitive."""
        return self._eqns[place].primitive.name

    def is_needed(self, var: Var, place: int) -> bool:
        """Whether equations from this place on need a variable."""
        return self._last.get(var, -1) >= place

    def is_stale(self, leaf: int, steps: Mapping[int, int], place: int) -> bool:
        """Whether an equation before this place has used these steps of a leaf."""
        return any(
            i < place and _agree(chosen, steps)
            for i, chosen in self._uses.get(leaf, ())
        )

    def _is_run(self, i):
        # Whether an equation is needed and evaluated in its turn.
        return self._needed[i] and i not in self._lazy

    def _classify(self, new):
        self._lazy, self._of_leaves, self._maker = set(), set(), {}
        for i, eqn in enumerate(self._eqns):
            operands = variables(eqn)
            if not eqn.effects and self.free.issuperset(operands):
                self._of_leaves.add(i)
                self.free.update(eqn.outvars)
            views = [view for v in eqn.outvars for view in self._views.get(v, ())]
            is_part = any(view.leaf in new for view in views) and not eqn.effects
            if i in self._of_leaves or is_part:
                self._lazy.add(i)
                self._maker.update(dict.fromkeys(eqn.outvars, i))
            if not self.double.isdisjoint(operands):
                # (Integers are the same in both lanes.)
                self.double.update(v for v in eqn.outvars if not _is_integer(v))

    def _schedule(self):
        places = {site.place for each in self._sites.values() for site in each}
        self._last, self._needed = {}, [False] * len(self._eqns)
        for i in reversed(range(len(self._eqns))):
            eqn = self._eqns[i]
            last = [self._last[v] for v in eqn.outvars if v in self._last]
            needed = bool(eqn.effects or last)
            self._needed[i] = needed
            if needed or i in places:
                until = max(last) if last and i in self._lazy else i
                for v in variables(eqn):
                    self._last[v] = max(until, self._last.get(v, -1))
        # The steps of leaves that enter equations evaluated in order, with their
        # places.
        self._uses, known = {}, {}
        for i, eqn in enumerate(self._eqns):
            if self._is_run(i):
                for v in variables(eqn):
                    for leaf, chosen in self._leaves_of(v, known).items():
                        self._uses.setdefault(leaf, []).append((i, chosen))

    def _leaves_of(self, var, known):
        # The leaves that a variable depends on through equations that are not evaluated
        # in their turn, each with the steps that were chosen along its axes.
        maker = self._maker.get(var)
        if var not in self.double or (maker is None and var not in self.free):
            return {}
        if var not in known:
            views = self._views.get(var, ())
            found = {view.leaf: known_steps(view.at) for view in views}
            eqn = None if maker is None else self._eqns[maker]
            if eqn is not None and eqn.primitive.name != "dynamic_slice":
                found = {}
                for operand in variables(eqn):
                    for leaf, chosen in self._leaves_of(operand, known).items():
                        before = found.get(leaf, chosen)
                        found[leaf] = dict(before.items() & chosen.items())
            known[var] = found
        return known[var]

    def _late(self, chosen):
        # The equations that these need and that are evaluated wherever they are needed,
        # and the variables that all of them read.
        found, read = set(), set()
        todo = [v for i in chosen for v in variables(self._eqns[i])]
        while todo:
            v = todo.pop()
            i = self._maker.get(v)
            if i is None:
                read.add(v)
            elif i not in found:
                found.add(i)
                todo += variables(self._eqns[i])
        return found, read


def known_steps(at: Sequence[Index]) -> dict[int, int]:
    """Returns the steps that were chosen along axes of a leaf."""
    known = [index for index in at if isinstance(index.value, Known)]
    return {index.factor.axis: index.value.index for index in known}


def variables(eqn: JaxprEqn) -> list[Var]:
    """Returns the variables among the operands of an equation."""
    return [a for a in eqn.invars if not isinstance(a, Literal)]


def _agree(first, second):
    return all(second.get(axis, step) == step for axis, step in first.items())


def _is_integer(var):
    return jnp.issubdtype(var.aval.dtype, jnp.integer)
