from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.tree_util as jtu
from jaxtyping import PyTree

from ._owners import LeafInfo
from ._rules import is_every, Rule, Rules


class Choice(NamedTuple):
    """The choice of a filter for one leaf.

    - `value`: a leaf of a prefix tree, or the action of a rule. `None` if no rule
        matches.
    - `alone`: whether it is about this leaf alone, not about a subtree.
    - `named`: whether the filter names the leaf in particular: by a place of a prefix,
        or by a rule other than `*`, which selects all weights that can be quantized.
    - `otherwise`: if `value` leaves the leaf out, the reason.
    - `rule`: the rule that matches, if any.
    """

    value: Any
    alone: bool
    named: bool
    otherwise: str
    rule: Rule | None = None


def choices(
    spec: Rules | PyTree,
    tree: PyTree,
    infos: Sequence[LeafInfo | None],
    *,
    argument: str,
    is_leaf: Callable[[Any], bool],
    is_spec_leaf: Callable[[Any], bool],
    strict: bool,
) -> list[Choice]:
    """Evaluates a filter for each leaf.

    - `spec`: the filter: [`eqquant.Rules`][], or a prefix of `tree`.
    - `tree`, `infos`: the tree, and the description of each of its leaves.
    - `argument`: the name of the filter's argument, for errors.
    - `is_leaf`, `is_spec_leaf`: which nodes of `tree` and of a prefix are leaves.
    - `strict`: whether a rule that matches no leaf is an error.

    **Raises:**

    A `ValueError` if a prefix has another structure than `tree`.
    """
    if isinstance(spec, Rules):
        rules = spec.assign(infos, argument, strict)
        return [_by_rule(rule) for rule in rules]
    found = []

    def extend(value, subtree):
        leaves = jtu.tree_leaves(subtree, is_leaf=is_leaf)
        named = value is not spec
        alone = named and len(leaves) == 1 and leaves[0] is subtree
        choice = Choice(value, alone, named, f"left out by `{argument}`")
        found.extend([choice] * len(leaves))

    try:
        jtu.tree_map(extend, spec, tree, is_leaf=is_spec_leaf)
    except ValueError as e:
        raise ValueError(
            f"`{argument}` should be a prefix of the model: a PyTree with the same "
            "nodes, whose leaves may stand for whole parts; or `Rules`, which select "
            f"arrays by their paths. Got another structure:\n{e}"
        ) from e
    return found


def _by_rule(rule):
    if rule is None:
        return Choice(None, False, False, "no rule matches")
    condition, action = rule
    reason = f"left out by the rule {condition!r}"
    return Choice(action, True, not is_every(rule), reason, rule)
