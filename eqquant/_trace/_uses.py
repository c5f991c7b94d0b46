import dataclasses
import itertools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import equinox as eqx
import jax
import jax.tree_util as jtu
from jax.extend.core import JaxprEqn, Literal

from .._implicit import opened, sizes_of_scan
from ._meeting import meeting, products, stacked
from ._view import chosen, follow, whole


@dataclasses.dataclass(frozen=True)
class Product:
    """A product that a leaf enters.

    - `contracted`: the axes of the leaf that are contracted.
    - `rows`: the number of rows of the other operand that meet one matrix at a time.
    - `input`: equal for products whose other operand is the same value, contracted
        along the same axes.
    - `stacked`: the axes of the leaf that are no axes of the matrix: an index was
        chosen along them, or each index meets inputs of its own.
    """

    contracted: tuple[int, ...]
    rows: int
    input: Hashable
    stacked: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Use:
    """What a program does with a leaf.

    - `products`: the products that it enters, in order.
    - `others`: the names of the primitives that it enters and leaves as something else.
    """

    products: tuple[Product, ...]
    others: tuple[str, ...]


def uses(fn: Callable[..., Any], args: Sequence[Any]) -> tuple[Use, ...]:
    """What a function does with each array among its arguments. It is traced, and not
    run.

    **Arguments:**

    - `fn`: the function.
    - `args`: its arguments, in which arrays may be `jax.ShapeDtypeStruct`s. Leaves
        that are not arrays are passed unchanged.

    **Returns:**

    A `Use` for each array, in the order of `jax.tree_util.tree_leaves`.
    """
    dynamic, static = eqx.partition(tuple(args), is_array)

    def call(dynamic):
        out = fn(*eqx.combine(dynamic, static))
        return eqx.filter(out, eqx.is_array)

    leaves = jtu.tree_leaves(dynamic)
    walk = _Walk([leaf.shape for leaf in leaves])
    views = [(whole(i, leaf.shape),) for i, leaf in enumerate(leaves)]
    walk.walk(jax.make_jaxpr(call)(dynamic), views, walk.new(len(leaves)))
    return tuple(
        Use(tuple(found), tuple(dict.fromkeys(others)))
        for found, others in zip(walk.products, walk.others)
    )


def is_array(x: Any) -> bool:
    """Whether this is an array, or describes one."""
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


calls = {
    "checkpoint",
    "closed_call",
    "core_call",
    "core_closed_call",
    "custom_jvp_call",
    "custom_vjp_call",
    "custom_vjp_call_jaxpr",
    "jit",
    "pjit",
    "remat",
    "remat2",
    "shard_map",
}


def body_of(eqn: JaxprEqn) -> Any:
    """The jaxpr that a call runs."""
    names = ("jaxpr", "call_jaxpr", "fun_jaxpr")
    return next(eqn.params[name] for name in names if name in eqn.params)


def is_kept(jaxpr: Any, place: int, result: int) -> bool:
    """Whether the body of a loop returns an operand unchanged."""
    jaxpr, _ = opened(jaxpr)
    return jaxpr.outvars[result] is jaxpr.invars[place]


# Of the same operands, these make the same value.
_determined = {
    "broadcast_in_dim",
    "convert_element_type",
    "reshape",
    "squeeze",
    "transpose",
}


class _Walk:
    # Each variable has the views that it is (several, if it is a concatenation), and a
    # number, which is equal for equal values.

    def __init__(self, shapes):
        self.shapes = shapes
        self.products = [[] for _ in shapes]
        self.others = [[] for _ in shapes]
        self._fresh = itertools.count()
        self._numbers = {}

    def new(self, n):
        return [next(self._fresh) for _ in range(n)]

    def walk(self, jaxpr, views, numbers):
        """The views of the results, and their numbers."""
        jaxpr, constants = opened(jaxpr)
        seen = dict(zip(jaxpr.invars, zip(views, numbers, strict=True), strict=True))
        for var, constant in zip(jaxpr.constvars, constants):
            seen[var] = ((), self._numbered("constant", id(constant)))

        def read(atom):
            if isinstance(atom, Literal):
                return ((), next(self._fresh))
            return seen[atom]

        for eqn in jaxpr.eqns:
            ins = [read(atom) for atom in eqn.invars]
            outs = self._apply(eqn, [a for a, _ in ins], [b for _, b in ins])
            seen.update(zip(eqn.outvars, zip(*outs, strict=True), strict=True))
        found = [read(atom) for atom in jaxpr.outvars]
        return [a for a, _ in found], [b for _, b in found]

    def _numbered(self, *key):
        if key not in self._numbers:
            self._numbers[key] = next(self._fresh)
        return self._numbers[key]

    def _apply(self, eqn, views, numbers):
        name = eqn.primitive.name
        if name in calls:
            if name == "shard_map":
                views = [self._cut(eqn, i, each) for i, each in enumerate(views)]
            outs, numbers = self.walk(body_of(eqn), views, numbers)
            if name == "shard_map":
                outs = self._leave(outs, name)
            return outs, numbers
        inner = {"scan": self._scan, "while": self._while, "cond": self._cond}
        if name in inner:
            return inner[name](eqn, views, numbers), self.new(len(eqn.outvars))
        outs = [()] * len(eqn.outvars)
        for place, each in enumerate(views):
            for view in each:
                if name in products:
                    self._meet(eqn, place, view, numbers)
                    continue
                shape = self.shapes[view.leaf]
                found = follow(eqn, place, view, shape, numbers)
                if all(new is None for new in found):
                    self.others[view.leaf].append(_other(name))
                outs = [a if b is None else (*a, b) for a, b in zip(outs, found)]
        if name in _determined:
            params = tuple(sorted(eqn.params.items()))
            return outs, [self._numbered(name, params, *numbers)]
        return outs, self.new(len(outs))

    def _meet(self, eqn, place, view, numbers):
        shape = self.shapes[view.leaf]
        met = meeting(eqn, place, view, shape)
        if met is None:
            self.others[view.leaf].append(eqn.primitive.name)
            return
        source = (numbers[met.other], met.columns, met.batch)
        axes = stacked(met, view, shape)
        self.products[view.leaf].append(Product(met.contracted, met.rows, source, axes))

    def _leave(self, views, name):
        for each in views:
            for view in each:
                self.others[view.leaf].append(name)
        return [()] * len(views)

    def _cut(self, eqn, place, views):
        # Inside `shard_map`, axes that are split are shorter.
        outer = eqn.invars[place].aval.shape
        inner = opened(body_of(eqn))[0].invars[place].aval.shape
        if outer == inner:
            return views
        return self._leave([views], eqn.primitive.name)[0]

    def _scan(self, eqn, views, numbers):
        jaxpr, length = eqn.params["jaxpr"], eqn.params["length"]
        consts, carried = sizes_of_scan(eqn)
        first = consts + carried
        inside = list(views[:consts])
        for i in range(consts, len(views)):
            if i < first and is_kept(jaxpr, i, i - consts):
                inside.append(views[i])
            elif i < first:
                inside += self._leave([views[i]], "scan")
            else:
                found = [chosen(view, 0, None) for view in views[i]]
                for view, new in zip(views[i], found):
                    if new is None and length > 1:
                        self.others[view.leaf].append("scan")
                inside.append(tuple(new for new in found if new is not None))
        new = [*numbers[:consts], *self.new(len(numbers) - consts)]
        outs, _ = self.walk(jaxpr, inside, new)
        kept = [i < carried and is_kept(jaxpr, consts + i, i) for i in range(len(outs))]
        return [
            views[consts + i] if kept[i] else self._leave([out], "scan")[0]
            for i, out in enumerate(outs)
        ]

    def _while(self, eqn, views, numbers):
        jaxpr = eqn.params["body_jaxpr"]
        first = eqn.params["cond_nconsts"]
        consts = eqn.params["body_nconsts"]
        second = first + consts
        carried = [
            view if is_kept(jaxpr, consts + i, i) else self._leave([view], "while")[0]
            for i, view in enumerate(views[second:])
        ]
        new = self.new(len(carried))
        of_cond = [*views[:first], *carried], [*numbers[:first], *new]
        of_body = [*views[first:second], *carried], [*numbers[first:second], *new]
        self.walk(eqn.params["cond_jaxpr"], *of_cond)
        outs, _ = self.walk(jaxpr, *of_body)
        return [
            view if is_kept(jaxpr, consts + i, i) else self._leave([out], "while")[0]
            for i, (view, out) in enumerate(zip(carried, outs, strict=True))
        ]

    def _cond(self, eqn, views, numbers):
        outs = [self.walk(b, views[1:], numbers[1:])[0] for b in eqn.params["branches"]]
        joint = []
        for each in zip(*outs, strict=True):
            same = all(views == each[0] for views in each)
            joint.append(each[0] if same else self._leave(each, "cond")[0])
        return joint


def _other(name: str) -> str:
    # An index into a table is a gather of one row.
    return "gather" if name == "dynamic_slice" else name
