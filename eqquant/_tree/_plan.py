import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TYPE_CHECKING

import jax
from jaxtyping import PyTree

from ._callers import smallest_on_call
from ._decide import decisions
from ._decision import Decision
from ._fold import folded
from ._on_call import put_on_call, rebuilt
from ._request import Request
from ._rounding import rounding
from ._sequential import is_sequential, rounding_in_sequence
from ._skeleton import skeleton
from ._warnings import warn_of_little


if TYPE_CHECKING:
    from .._solvers import AbstractMethod
    from .._trace import Sequential, Statistics


@dataclasses.dataclass(frozen=True, eq=False)
class Plan:
    """How a model changes on a request.

    - `request`: the request.
    - `decisions`: the decision on each leaf of the model.
    - `callers`: the modules whose calls then have to run through
        [`eqquant.implicit`][]. It maps their `id` to whether every method has to. With
        an `example`, these are the smallest modules that suffice.
    """

    request: Request
    decisions: Sequence[Decision]
    callers: dict[int, bool]

    def rounded(
        self,
        stats: "Statistics | Sequential | None" = None,
        method: "AbstractMethod | None" = None,
    ) -> list[Any]:
        """Returns the leaves of the model, rounded to the formats of the decisions.
        The arguments are as in `tree_quantize`."""
        if is_sequential(stats):
            model, each = self.request.model, self.decisions
            return rounding_in_sequence(model, each, stats, method).leaves(each)
        each, stats = folded(self.decisions, stats, method)
        return rounding(each, stats, method).leaves(each)

    def rebuilt(self, leaves: Iterable[Any]) -> PyTree:
        """Returns the model with new leaves."""
        change = put_on_call(self.callers)
        return rebuilt(self.request.model, leaves, change, self.request.is_leaf)


def skeleton_of(decision: Decision) -> Any:
    """Returns the leaf of a decision; its skeleton, if it is to be quantized."""
    leaf, info = decision.leaf, decision.info
    if info is None or decision.format is None:
        return leaf
    struct = jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    return skeleton(struct, decision.format, info.axis)


def plan(request: Request, new: Callable[[Decision], Any] = skeleton_of) -> Plan:
    """Plans how a model changes on a request. Raises the errors of
    [`eqquant.tree_quantize`][] about its arguments up to `example`. Warns the caller of
    the function that calls this. `new` maps a decision to the new leaf, or to its
    skeleton."""
    found = decisions(request)
    warn_of_little(request, found)
    callers = {id(module): False for d in found for module in d.on_call}
    if request.call is not None:
        leaves = [(decision.leaf, decision.info) for decision in found]
        callers = smallest_on_call(request, leaves, [*map(new, found)], callers)
    return Plan(request, found, callers)
