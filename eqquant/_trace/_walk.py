import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr

from .._implicit import opened, sizes_of_scan
from ._bodies import body_of, calls, is_kept
from ._follow import changed, follow
from ._meeting import lead, meeting, products, stacked
from ._propagate import propagate
from ._site import Known, Product, Site, Step
from ._view import chosen, joint, View, whole, with_view


class Walked(NamedTuple):
    """The result of a walk, for each operand of a program.

    - `sites`: the products that it enters.
    - `others`: see `Use`.
    - `changed`: the products that it enters with its numbers changed, see `Use`.
    - `changing`: for each such operand, the `id`s of these products, and of the
        equations that change it.
    - `views`: the views of each variable of the program that has any.
    """

    sites: list[list[Site]]
    others: list[list[str]]
    changed: list[list[Site]]
    changing: list[set[int]]
    views: dict[Any, tuple[View, ...]]


def walk(
    jaxpr: ClosedJaxpr,
    shapes: Sequence[Sequence[int]],
    argument: Sequence[int],
    steps: int = 0,
) -> Walked:
    """Follows the operands of a program. Each belongs to an argument. Further operands
    are the indices of `steps` steps."""
    walk = _Walk(shapes, argument)
    views = [(whole(i, shape),) for i, shape in enumerate(shapes)] + [()] * steps
    numbers = [walk.new(1, frozenset((i,)))[0] for i in argument]
    numbers += [walk.known(i) for i in range(steps)]
    seen = walk.top(jaxpr, views, numbers)
    return Walked(walk.sites, walk.others, walk.changed, walk.changing, seen)


# Primitives that give equal values for equal operands.
_determined = {
    "broadcast_in_dim",
    "convert_element_type",
    "reshape",
    "squeeze",
    "transpose",
}


class _Walk:
    # Each variable has its views (several, if it is a concatenation), and a number.
    # Equal numbers mean equal values. Each number has the arguments that its value
    # depends on.

    def __init__(self, shapes, argument):
        self.shapes = shapes
        self.sites = [[] for _ in shapes]
        self.others = [[] for _ in shapes]
        self.changed = [[] for _ in shapes]
        self.changing = [set() for _ in shapes]
        self._argument = argument
        self._fresh = itertools.count()
        self._numbers = {}
        self._sources = {}
        self._inside = ()
        self._place = 0

    def new(self, n, sources):
        numbers = [next(self._fresh) for _ in range(n)]
        self._sources |= dict.fromkeys(numbers, sources)
        return numbers

    def known(self, i):
        # (It depends on no input.)
        self._sources[Known(i)] = frozenset()
        return Known(i)

    def _all_sources(self, numbers):
        return frozenset().union(*(self._sources[i] for i in numbers))

    def top(self, jaxpr, views, numbers):
        """Walks through the whole program. Returns the views of its variables."""
        places = itertools.count()

        def rule(eqn, values):
            self._place = next(places)
            return self._rule(eqn, values)

        _, seen = self._propagate(jaxpr, views, numbers, rule)
        return {var: views for var, (views, _) in seen.items() if views}

    def walk(self, jaxpr, views, numbers):
        """Returns the views of the results, and their numbers."""
        found, _ = self._propagate(jaxpr, views, numbers, self._rule)
        return [a for a, _ in found], [b for _, b in found]

    def _propagate(self, jaxpr, views, numbers, rule):
        literal = lambda a: ((), self._numbered((), "literal", a.aval, str(a.val)))
        constant = lambda a: ((), self._numbered((), "constant", id(a)))
        return propagate(
            jaxpr, zip(views, numbers, strict=True), rule, literal, constant
        )

    def _rule(self, eqn, values):
        outs = self._apply(eqn, [a for a, _ in values], [b for _, b in values])
        return zip(*outs, strict=True)

    def _numbered(self, operands, *key):
        key = (*key, *operands)
        if key not in self._numbers:
            (self._numbers[key],) = self.new(1, self._all_sources(operands))
        return self._numbers[key]

    def _apply(self, eqn, views, numbers):
        name = eqn.primitive.name
        if name in calls:
            if name == "shard_map":
                return self._shard_map(eqn, views, numbers)
            return self.walk(body_of(eqn), views, numbers)
        inner = {"scan": self._scan, "while": self._while, "cond": self._cond}
        new = lambda: self.new(len(eqn.outvars), self._all_sources(numbers))
        if name in inner:
            return inner[name](eqn, views, numbers), new()
        outs = [()] * len(eqn.outvars)
        for place, each in enumerate(views):
            for view in each:
                if name in products:
                    self._meet(eqn, place, view, numbers)
                    continue
                shape = self.shapes[view.leaf]
                found = follow(eqn, place, view, shape, numbers)
                if all(out is None for out in found):
                    self._lost(view, _other(name))
                    found = [self._changed(eqn, place, view, numbers)] * len(found)
                outs = [with_view(a, b) for a, b in zip(outs, found)]
        if name in _determined:
            params = tuple(sorted(eqn.params.items()))
            return outs, [self._numbered(numbers, name, params)]
        return outs, new()

    def _lost(self, view, name):
        if not view.changed:
            self.others[view.leaf].append(name)

    def _changed(self, eqn, place, view, numbers):
        if not self._all_sources(numbers) <= {self._argument[view.leaf]}:
            return None
        self.changing[view.leaf].add(id(eqn))
        return changed(eqn, place, view)

    def _meet(self, eqn, place, view, numbers):
        shape = self.shapes[view.leaf]
        met = meeting(eqn, place, view, shape)
        if met is None:
            self._lost(view, eqn.primitive.name)
            return
        other = numbers[met.other]
        axes = stacked(met, view, shape)
        source = (other, met.columns, met.batch, met.windows, met.piece)
        sources = self._sources[other]
        whole = met.piece is None
        product = Product(met.contracted, met.rows, source, axes, sources, whole)
        site = self._site(product, met, view)
        if not view.changed:
            self.sites[view.leaf].append(site)
            return
        self.changed[view.leaf].append(site)
        self.changing[view.leaf].add(id(eqn))

    def _site(self, product, met, view):
        found = lead(met, view, self.shapes[view.leaf])
        if None in self._inside:
            found = None
        return Site(
            product,
            self._place,
            next(self._fresh),
            found,
            view.at,
            self._inside,
            met.is_known,
        )

    def _within(self, label, *args):
        # The label `None` means that inputs cannot be summed inside.
        before, self._inside = self._inside, (*self._inside, label)
        found = self.walk(*args)
        self._inside = before
        return found

    def _leave(self, views, name):
        for view in views:
            self._lost(view, name)
        return ()

    def _shard_map(self, eqn, views, numbers):
        # Inside, split axes are shorter.
        outer, inner = eqn.invars, opened(body_of(eqn))[0].invars
        views = [
            each if a.aval.shape == b.aval.shape else self._leave(each, "shard_map")
            for a, b, each in zip(outer, inner, views, strict=True)
        ]
        # Without `check_vma`, JAX does not track which values devices share.
        label = next(self._fresh) if eqn.params["check_vma"] else None
        within = [self.new(1, self._sources[i])[0] for i in numbers]
        outs, _ = self._within(label, body_of(eqn), views, within)
        return (
            [self._leave(out, "shard_map") for out in outs],
            self.new(len(outs), self._all_sources(numbers)),
        )

    def _scan(self, eqn, views, numbers):
        jaxpr, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carried = sizes_of_scan(eqn)
        first = consts + carried
        inside = list(views[:consts])
        step = Step(next(self._fresh), eqn.params["reverse"])
        for i in range(consts, len(views)):
            if i < first and is_kept(jaxpr, i, i - consts):
                inside.append(views[i])
            elif i < first:
                inside.append(self._leave(views[i], "scan"))
            else:
                found = [chosen(view, 0, step) for view in views[i]]
                for view, new in zip(views[i], found):
                    if new is None and length > 1:
                        self._lost(view, "scan")
                inside.append(tuple(new for new in found if new is not None))
        # Carried values may come to depend on all operands.
        every = self._all_sources(numbers)
        sources = [every] * carried + [self._sources[i] for i in numbers[first:]]
        new = [*numbers[:consts], *(self.new(1, each)[0] for each in sources)]
        outs, _ = self._within(step, jaxpr, inside, new)
        kept = [i < carried and is_kept(jaxpr, consts + i, i) for i in range(len(outs))]
        return [
            views[consts + i] if kept[i] else self._leave(out, "scan")
            for i, out in enumerate(outs)
        ]

    def _while(self, eqn, views, numbers):
        jaxpr = eqn.params["body_jaxpr"]
        first = eqn.params["cond_nconsts"]
        consts = eqn.params["body_nconsts"]
        second = first + consts
        carried = [
            view if is_kept(jaxpr, consts + i, i) else self._leave(view, "while")
            for i, view in enumerate(views[second:])
        ]
        new = self.new(len(carried), self._all_sources(numbers))
        of_cond = [*views[:first], *carried], [*numbers[:first], *new]
        of_body = [*views[first:second], *carried], [*numbers[first:second], *new]
        self._within(None, eqn.params["cond_jaxpr"], *of_cond)
        outs, _ = self._within(next(self._fresh), jaxpr, *of_body)
        return [
            view if is_kept(jaxpr, consts + i, i) else self._leave(out, "while")
            for i, (view, out) in enumerate(zip(carried, outs, strict=True))
        ]

    def _cond(self, eqn, views, numbers):
        branches = eqn.params["branches"]
        outs = [
            self._within(label, branch, views[1:], numbers[1:])[0]
            for label, branch in zip(self.new(len(branches), frozenset()), branches)
        ]
        found = []
        for each in zip(*outs, strict=True):
            same = joint(each)
            if same is None:
                same = self._leave(itertools.chain(*each), "cond")
            found.append(same)
        return found


def _other(name: str) -> str:
    # An index into a table is a gather of one row.
    return "gather" if name == "dynamic_slice" else name
