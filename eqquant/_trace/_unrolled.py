from collections.abc import Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, JaxprEqn

from .._implicit import as_arrays, bind, sizes_of_scan
from ._bodies import body_of, calls
from ._evaluate import evaluate, Views
from ._follow import follow
from ._meeting import products
from ._view import chosen, whole, with_view


def unrolled(
    jaxpr: ClosedJaxpr,
    shapes: Sequence[Sequence[int]],
    leaves: Collection[int],
    steps: int,
) -> ClosedJaxpr:
    """Returns a program as one list of equations: calls are inlined, and scans along an
    axis of some operands are unrolled. It has a further operand in `uint32` for the
    index of each step, so that the equations of different steps differ in this operand
    alone.

    - `shapes`: the shapes of its operands.
    - `leaves`: the numbers of these operands.
    - `steps`: the length of the longest of these scans.
    """

    def call(*operands):
        values, indices = operands[: len(shapes)], operands[len(shapes) :]
        views = [
            (whole(i, shape),) if i in leaves else () for i, shape in enumerate(shapes)
        ]
        unroll = _Unroll(shapes, indices)
        return evaluate(jaxpr, values, views, unroll.apply)[0]

    given = [_described(aval) for aval in jaxpr.in_avals]
    return jax.make_jaxpr(call)(*given, *[np.uint32(i) for i in range(steps)])


def _described(aval: Any) -> jax.ShapeDtypeStruct:
    explicit = bool(aval.sharding.mesh.explicit_axes)
    return jax.ShapeDtypeStruct(
        aval.shape,
        aval.dtype,
        sharding=aval.sharding if explicit else None,
        weak_type=aval.weak_type,
    )


class _Unroll:
    def __init__(self, shapes, indices):
        self._shapes = shapes
        self._indices = indices

    def apply(self, eqn: JaxprEqn, values: list[Any], views: list[Views]):
        name = eqn.primitive.name
        if name in calls and name != "shard_map":
            return evaluate(body_of(eqn), as_arrays(eqn, values), views, self.apply)
        if name == "scan" and any(self._along(eqn, views)):
            return self._scan(eqn, as_arrays(eqn, values), views)
        found: list[Views] = [()] * len(eqn.outvars)
        if name not in products:
            for place, view in [(i, v) for i, each in enumerate(views) for v in each]:
                new = follow(eqn, place, view, self._shapes[view.leaf], values)
                found = [with_view(a, b) for a, b in zip(found, new)]
        return bind(eqn, values), found

    def _along(self, eqn, views):
        # The views of one step along the scanned axis.
        return [
            tuple(new for v in each if (new := chosen(v, 0, None)) is not None)
            for each in views[sum(sizes_of_scan(eqn)) :]
        ]

    def _scan(self, eqn, values, views):
        consts, carried = sizes_of_scan(eqn)
        first, each = consts + carried, self._along(eqn, views)
        jaxpr, length = eqn.params["jaxpr"], eqn.params["length"]
        steps = range(length)
        carry, kept = values[consts:first], views[consts:first]
        stacks: list[Any] = [None] * length
        for i in reversed(steps) if eqn.params["reverse"] else steps:
            at = lambda x: _at(x, self._indices[i])
            outs, found = evaluate(
                jaxpr,
                [*values[:consts], *carry, *map(at, values[first:])],
                [*views[:consts], *kept, *each],
                self.apply,
            )
            carry, kept, stacks[i] = outs[:carried], found[:carried], outs[carried:]
        ys = [jnp.stack(each) for each in zip(*stacks, strict=True)]
        return [*carry, *ys], [*kept, *[()] * len(ys)]


def _at(x, index):
    if x.shape[0] == 1:
        return lax.squeeze(x, [0])
    zeros = [jnp.zeros_like(index)] * (x.ndim - 1)
    return lax.squeeze(lax.dynamic_slice(x, [index, *zeros], (1, *x.shape[1:])), [0])
