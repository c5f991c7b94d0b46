import fnmatch
from collections.abc import Callable, Sequence
from typing import Any, cast, TypeAlias

import equinox as eqx
from jax.sharding import PartitionSpec, Sharding

from ..formats import AbstractFormat, as_format
from ._owners import LeafInfo


Condition: TypeAlias = str | Callable[[LeafInfo], bool]
Action: TypeAlias = AbstractFormat | PartitionSpec | Sharding | bool | None
Rule: TypeAlias = tuple[Condition, Action]


class Rules(eqx.Module):
    """Which leaves of a PyTree to quantize, or to shard, and how, by their paths. The
    first rule that matches a leaf decides.

    !!! Example

        ```python
        Rules([
            ("*.attention.*", eqquant.Int8()),
            ("*embed*", None),
            (lambda info: info.shape[-1] > 4096, eqquant.NF4(128)),
            ("*", "nf4"),
        ])
        ```
    """

    rules: tuple[Rule, ...] = eqx.field(static=True)

    def __init__(self, rules: Sequence[tuple[Condition, Any]]):
        """**Arguments:**

        - `rules`: pairs of a condition and what to do.

        The condition is a pattern that the whole path must match, in which `*` stands
        for anything, dots too; or a function from a [`eqquant.LeafInfo`][] to a
        boolean.

        What to do is a format or its name, `None` or `False` to leave the leaf as it
        is, or `True` for the format that `tree_quantize` was given. A format overrides
        the minimum size, the exception of embeddings, and that an owner is unknown. For
        [`eqquant.tree_shard`][], it is a sharding.
        """
        self.rules = tuple(_check(rule) for rule in rules)

    def match(self, info: LeafInfo) -> int | None:
        """Which rule decides about a leaf. `None` if there is none."""
        matching = (i for i in range(len(self.rules)) if self.matches(i, info))
        return next(matching, None)

    def matches(self, index: int, info: LeafInfo) -> bool:
        condition, _ = self.rules[index]
        if isinstance(condition, str):
            return fnmatch.fnmatchcase(info.path, condition)
        return bool(condition(info))


def _check(rule: Any) -> Rule:
    if not (isinstance(rule, tuple | list) and len(rule) == 2):
        raise ValueError(
            "Each of `rules` should be a pair, of a pattern and a format. Got "
            f"{rule!r}."
        )
    condition, action = rule
    if not (isinstance(condition, str) or callable(condition)):
        raise TypeError(
            "The first of a rule should be a pattern, or a function of a `LeafInfo`. "
            f"Got {condition!r}."
        )
    if action is None or isinstance(action, bool | PartitionSpec | Sharding):
        return cast(Rule, (condition, action))
    return cast(Rule, (condition, as_format(action)))
