import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Literal

from .._implicit import sizes_of_scan
from ._bodies import body_of, calls, is_kept
from ._capture import Slot
from ._follow import follow
from ._meeting import meeting
from ._propagate import propagate
from ._view import chosen, Factor, repeated, View, whole


# Inputs can be divided by a scale for each channel, and their weights multiplied by it,
# if an earlier leaf, such as the weight of a norm, is a factor of the inputs: dividing
# this leaf costs nothing.


class Fold(NamedTuple):
    """Leaves that scale the inputs of some weights. If all `factors` are divided by a
    scale for each channel, and the weights of all `slots` are multiplied by it, the
    results of the program do not change.

    - `factors`: leaves, each with its axes of channels.
    - `slots`: weights, each with its contracted axes, which are the channels.
    """

    factors: tuple[Slot, ...]
    slots: tuple[Slot, ...]


def folds(
    jaxpr: ClosedJaxpr, shapes: Sequence[Sequence[int]], number: int
) -> list[Fold]:
    """Returns the folds of a program among the first `number` of its operands. Other
    operands and branches are not followed."""
    walk = _Walk(shapes)
    ins = [
        _Value((whole(i, shape),) if i < number else (), None)
        for i, shape in enumerate(shapes)
    ]
    for out in walk.walk(jaxpr, ins):
        walk.lose(out)
    return walk.found()


class _Scaled(NamedTuple):
    """A value that leaves scale along some channels.

    - `birth`: the number of the product or sum that scaled it first.
    - `view`: the view of an array whose first axis is the channels, and whose others
        are the other axes of the value.
    - `shape`: the shape of that array.
    """

    birth: int
    view: View
    shape: tuple[int, ...]


class _Value(NamedTuple):
    views: tuple[View, ...]
    scaled: _Scaled | None


_nothing = _Value((), None)


class _Walk:
    def __init__(self, shapes):
        self.shapes = shapes
        self._lost_births: set[int] = set()
        self._lost_leaves: set[int] = set()
        self._parent: list[int] = []  # births that have to be folded together
        self._factors: list[tuple[int, Slot]] = []
        self._met: list[tuple[int, Slot]] = []
        self._uses: list[int] = []  # leaves, once for each product

    def found(self) -> list[Fold]:
        """Returns all folds that are proved."""
        groups: dict[int, tuple[list, list]] = {}
        for birth, slot in self._factors:
            groups.setdefault(self._root(birth), ([], []))[0].append(slot)
        for birth, slot in self._met:
            groups.setdefault(self._root(birth), ([], []))[1].append(slot)
        lost = {self._root(birth) for birth in self._lost_births}
        every = [leaf for _, (leaf, _) in self._factors]
        return [
            Fold(tuple(factors), tuple(dict.fromkeys(slots)))
            for root, (factors, slots) in groups.items()
            if root not in lost and slots and self._is_proved(factors, slots, every)
        ]

    def _is_proved(self, factors, slots, every):
        weights = {leaf for leaf, _ in slots}
        return (
            # Nothing else uses the factors or the weights.
            all(every.count(leaf) == 1 for leaf, _ in factors)
            and not self._lost_leaves & {leaf for leaf, _ in factors}
            and not self._lost_leaves & weights
            and len(weights) == len(set(slots))
            and all(
                self._uses.count(leaf) == sum(leaf == met for met, _ in slots)
                for leaf in weights
            )
            and not weights & {leaf for leaf, _ in factors}
        )

    def _root(self, birth):
        while self._parent[birth] != birth:
            birth = self._parent[birth]
        return birth

    def _is_known(self, scaled):
        return scaled is not None and scaled.birth not in self._lost_births

    def lose(self, value: _Value) -> None:
        """Marks a value whose further use cannot be followed."""
        self._lost_leaves.update(view.leaf for view in value.views)
        if value.scaled is not None:
            self._lost_births.add(value.scaled.birth)

    def walk(self, jaxpr: Any, ins: Sequence[_Value]) -> list[_Value]:
        """Returns the values of the results of a program."""
        nothing = lambda _: _nothing
        results, _ = propagate(jaxpr, ins, self._apply, nothing, nothing)
        return results

    def _apply(self, eqn, values):
        if all(value == _nothing for value in values):
            return [_nothing] * len(eqn.outvars)
        name = eqn.primitive.name
        if name in calls and name != "shard_map":
            return self.walk(body_of(eqn), values)
        if name == "scan":
            return self._scan(eqn, values)
        if name == "dot_general":
            return [self._dot(eqn, values)]
        if name in ("mul", "div"):
            return [self._multiply(eqn, values)]
        if name in ("add", "add_any", "sub"):
            return [self._add(eqn, values)]
        if name == "neg" or (name == "max" and _is_zero(eqn.invars[1])):
            if values[0].scaled is not None:
                return [values[0]]
        return self._follow(eqn, values)

    def _follow(self, eqn, values):
        # Primitives that change nothing but the shape.
        outs = [_nothing] * len(eqn.outvars)
        names = list(range(len(values)))
        for place, value in enumerate(values):
            if value == _nothing:
                continue
            if value.scaled is not None and not _stays_scaled(eqn):
                self.lose(value)
                continue
            kept = []
            for view in value.views:
                kept.append(follow(eqn, place, view, self.shapes[view.leaf], names))
            if value.scaled is not None:
                birth, view, shape = value.scaled
                new = follow(eqn, place, view, shape, names)
                kept.append(
                    [None if v is None else _Scaled(birth, v, shape) for v in new]
                )
            if any(found is None for each in kept for found in each):
                self.lose(value)
                continue
            for i, found in enumerate(zip(*kept, strict=True)):
                views = tuple(v for v in found if isinstance(v, View))
                scaled = [v for v in found if isinstance(v, _Scaled)]
                outs[i] = _Value(outs[i].views + views, scaled[0] if scaled else None)
        return outs

    def _born(self, leaf, axes, dims):
        # `dims`: for each axis of the value, the factors of the leaf, or its size.
        birth = len(self._parent)
        self._parent.append(birth)
        self._factors.append((birth, (leaf, axes)))
        sizes = [self.shapes[leaf][i] for i in axes]
        inner = {a: math.prod(sizes[i + 1 :]) for i, a in enumerate(axes)}
        of = lambda f: Factor(0, f.size, f.stride * inner[f.axis])
        new = [dim if isinstance(dim, int) else tuple(map(of, dim)) for dim in dims]
        return _as_scaled(birth, math.prod(sizes), new)

    def _vector(self, eqn, value):
        # The view and the axes of a leaf with one number for each channel.
        if len(value.views) != 1 or value.scaled is not None:
            return None
        (view,) = value.views
        kept = [f for dim in view.dims for f in dim if f.axis != repeated]
        mixed = any(len({f.axis == repeated for f in dim}) > 1 for dim in view.dims)
        axes = tuple(sorted({f.axis for f in kept}))
        whole = all(f.axis >= 0 for f in kept) and math.prod(
            f.size for f in kept
        ) == math.prod(self.shapes[view.leaf][i] for i in axes)
        shape = eqn.outvars[0].aval.shape
        if mixed or not whole or not axes or len(view.dims) != len(shape):
            return None
        dims = [
            dim if dim and dim[0].axis != repeated else n
            for dim, n in zip(view.dims, shape)
        ]
        return view, axes, dims

    def _multiply(self, eqn, values):
        first, second = values
        if not self._is_known(first.scaled) and eqn.primitive.name == "mul":
            first, second = second, first
        if first.scaled is not None:
            self.lose(second)
            return _Value((), first.scaled)
        for one, other in ((first, second), (second, first)):
            found = self._vector(eqn, one)
            if found is not None and eqn.primitive.name == "mul":
                view, axes, dims = found
                self.lose(other)
                return _Value((), self._born(view.leaf, axes, dims))
        self.lose(first)
        self.lose(second)
        return _nothing

    def _add(self, eqn, values):
        pair = []
        for value in values:
            scaled = value.scaled
            found = self._vector(eqn, value)
            if scaled is None and found is not None:
                scaled = self._born(found[0].leaf, found[1], found[2])
            pair.append(scaled)
        first, second = pair
        if (
            first is None
            or second is None
            or _is_mixed(first)
            or _channels(first) != _channels(second)
        ):
            for value, scaled in zip(values, pair):
                self.lose(_Value(value.views, scaled))
            return _nothing
        self._parent[self._root(second.birth)] = self._root(first.birth)
        return _Value((), first)

    def _dot(self, eqn, values):
        contracted, batch = eqn.params["dimension_numbers"]
        born = None
        for place, value in enumerate(values):
            for view in value.views:
                born = self._product(eqn, place, view, values, born)
        for place, value in enumerate(values):
            if value.scaled is None or values[1 - place].views:
                continue
            free = _free(eqn, place)
            channels = _channels(value.scaled)
            mixed = _is_mixed(value.scaled)
            if born is not None or mixed or any(channels[i] for i in contracted[place]):
                self.lose(value)
                continue
            # Axes that are mixed with others are not channels.
            dims: list[Any] = _sizes(eqn.outvars[0].aval.shape)
            at = len(batch[0]) + (len(_free(eqn, 0)) if place == 1 else 0)
            for i, j in (*enumerate(batch[place]), *enumerate(free, at)):
                dims[i] = channels[j] or dims[i]
            born = _as_scaled(value.scaled.birth, value.scaled.shape[0], dims)
        return _Value((), born)

    def _product(self, eqn, place, view, values, born):
        # A leaf is multiplied with something.
        other = values[1 - place]
        met = meeting(eqn, place, view, self.shapes[view.leaf])
        self._uses.append(view.leaf)
        if (
            met is None
            or not _is_plain(met)
            or other.views
            or len(values[place].views) > 1
        ):
            self.lose(values[place])
            self.lose(other)
            return born
        scaled = other.scaled
        if scaled is not None:
            channels = _channels(scaled)
            columns = [f for i in met.columns for f in channels[i]]
            rest = [i for i in range(len(channels)) if i not in met.columns]
            runs = all(
                a.stride == b.size * b.stride for a, b in itertools.pairwise(columns)
            )
            whole = runs and math.prod(f.size for f in columns) == scaled.shape[0]
            exact = all(
                math.prod(f.size for f in channels[i]) == n
                for i, n in enumerate(eqn.invars[met.other].aval.shape)
                if i in met.columns
            )
            if whole and exact and not any(channels[i] for i in rest):
                self._met.append((scaled.birth, (view.leaf, met.contracted)))
            else:
                self.lose(other)
        # The rows of the leaf scale the result.
        contracted, batch = eqn.params["dimension_numbers"]
        free = [view.dims[i] for i in _free(eqn, place)]
        axes = tuple(sorted({f.axis for dim in free for f in dim}))
        sizes = math.prod(f.size for dim in free for f in dim)
        if not axes or min(axes) < 0 or any(view.dims[i] for i in batch[place]):
            return born
        if sizes != math.prod(self.shapes[view.leaf][i] for i in axes):
            return born
        dims: list[Any] = _sizes(eqn.outvars[0].aval.shape)
        at = len(batch[0]) + (len(_free(eqn, 0)) if place == 1 else 0)
        for i, dim in enumerate(free):
            dims[at + i] = dim if dim else dims[at + i]
        return self._born(view.leaf, axes, dims)

    def _scan(self, eqn, values):
        jaxpr = eqn.params["jaxpr"]
        consts, carried = sizes_of_scan(eqn)
        first = consts + carried
        inside = []
        for i, value in enumerate(values):
            kept = i < consts or (i < first and is_kept(jaxpr, i, i - consts))
            if i < first and kept and value.scaled is None:
                inside.append(value)
                continue
            found = [chosen(view, 0, i) for view in value.views]
            if i < first or value.scaled is not None or None in found:
                self.lose(value)
                found = []
            inside.append(_Value(tuple(v for v in found if v is not None), None))
        for out in self.walk(jaxpr, inside):
            self.lose(out)
        return [_nothing] * len(eqn.outvars)


def _stays_scaled(eqn):
    # Whether a scaled operand gives a scaled result. (A concatenation adds other
    # numbers, and integers are rounded.)
    floats = all(jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in eqn.outvars)
    return floats and eqn.primitive.name != "concatenate"


def _is_plain(met):
    # Whether whole axes are contracted, in their order.
    in_order = list(met.contracted) == sorted(met.contracted)
    return in_order and met.piece is None and not met.windows


def _is_zero(atom):
    return isinstance(atom, Literal) and atom.val == 0


def _sizes(shape):
    return [int(n) for n in shape]


def _free(eqn, place):
    contracted, batch = eqn.params["dimension_numbers"]
    known = {*contracted[place], *batch[place]}
    return [i for i in range(len(eqn.invars[place].aval.shape)) if i not in known]


def _channels(scaled):
    # For each axis of a value, the factors that are channels.
    return [tuple(f for f in dim if f.axis == 0) for dim in scaled.view.dims]


def _is_mixed(scaled):
    return any(len({f.axis == 0 for f in dim}) > 1 for dim in scaled.view.dims)


def _as_scaled(birth, channels, dims):
    # `dims`: for each axis of the value, factors of the channels, or its size.
    shape, new = [channels], []
    for dim in dims:
        if isinstance(dim, int):
            new.append((Factor(len(shape), dim, 1),) if dim > 1 else ())
            shape.append(dim)
        else:
            new.append(dim)
    return _Scaled(birth, View(-1, tuple(new)), tuple(shape))
