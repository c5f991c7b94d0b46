import difflib
import fnmatch
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast, TypeAlias

import equinox as eqx
from jax.sharding import PartitionSpec, Sharding

from ..formats import AbstractFormat, as_format
from ._owners import LeafInfo


Condition: TypeAlias = str | Callable[[LeafInfo], bool]
Action: TypeAlias = AbstractFormat | PartitionSpec | Sharding | bool | None
Rule: TypeAlias = tuple[Condition, Action]


class Rules(eqx.Module):
    """Selects leaves of a PyTree by their paths, to quantize or to shard each. The
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

        - `rules`: pairs of a condition and an action.

        The condition is either a pattern that must match the whole path, in which `*`
        matches any text, dots included; or a function from a [`eqquant.LeafInfo`][] to
        a boolean.

        The action is a format or its name, `None` or `False` to leave the leaf as it
        is, or `True` for the `format` of [`eqquant.tree_quantize`][]. A format
        overrides `min_size`, `embeddings` and unknown owners. It is an error if none of
        the arrays that the pattern matches can be quantized, except for the pattern
        `"*"`.
        For [`eqquant.tree_shard`][], the action is a sharding.
        """
        if not isinstance(rules, Iterable):
            raise TypeError(
                "`rules` should be a sequence of pairs `(condition, action)`. Got "
                f"{rules!r}."
            )
        self.rules = tuple(_check(rule) for rule in rules)

    def assign(
        self, infos: Iterable[LeafInfo | None], argument: str, strict: bool = True
    ) -> list[Rule | None]:
        """Assigns to each leaf the first rule that matches, or `None`.

        **Raises:**

        A `ValueError`, about `argument`, if `strict` and a rule matches no leaf.
        """
        infos = list(infos)
        found = [None if info is None else self._first(info) for info in infos]
        if strict:
            known = [info for info in infos if info is not None]
            for rule in self.rules:
                if rule not in found and not any(matches(rule, x) for x in known):
                    raise ValueError(_unmatched(rule, known, argument))
        return found

    def _first(self, info):
        return next((rule for rule in self.rules if matches(rule, info)), None)


def matches(rule: Rule, info: LeafInfo) -> bool:
    """Whether a rule matches a leaf, unless an earlier rule does."""
    condition, _ = rule
    if isinstance(condition, str):
        return fnmatch.fnmatchcase(info.path, condition)
    return bool(condition(info))


def is_every(rule: Rule) -> bool:
    """Whether a rule matches every leaf."""
    condition, _ = rule
    return not str(condition).strip("*")


def _unmatched(rule, infos, argument):
    condition, _ = rule
    paths = [info.path for info in infos]
    near = difflib.get_close_matches(str(condition), paths, cutoff=0) or paths
    return (
        f"In `{argument}`, the rule {condition!r} matches no array. There are "
        f"{', '.join(map(repr, near[:3]))}, for example."
    )


def _check(rule: Any) -> Rule:
    if not (isinstance(rule, tuple | list) and len(rule) == 2):
        raise ValueError(
            f"Each of `rules` should be a pair `(condition, action)`. Got {rule!r}."
        )
    condition, action = rule
    if not (isinstance(condition, str) or callable(condition)):
        raise TypeError(
            "The condition of a rule should be a pattern, or a function of a "
            f"`LeafInfo`. Got {condition!r}."
        )
    if action is None or isinstance(action, bool | PartitionSpec | Sharding):
        return cast(Rule, (condition, action))
    return cast(Rule, (condition, as_format(action)))
