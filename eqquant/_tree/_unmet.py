import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._array import is_quantized
from ..formats import AbstractFormat, as_format
from ._choices import Choice
from ._decision import Decision
from ._request import Request
from ._rules import is_every, matches, Rules


# A filter names arrays with a format by
#
# - a rule whose pattern is not `*` alone: `*` means "every weight", and skips arrays
#   that cannot be quantized;
# - a format at a place of a prefix tree that has matrices. (Booleans and functions
#   there filter, as for `eqx.partition`.)
#
# It does so in vain if none of these arrays can be quantized, or is quantized in this
# format already. If a rule shares its arrays with earlier rules, the outcomes of these
# count, too.

# The kinds of `Skip` for an array that could be quantized, or need not be.
_by_choice = (
    *("not an array", "quantized", "not requested"),
    *("held", "small", "embedding"),
)
# The kinds for an array whose use is unknown or not supported.
by_use = ("unknown owner", "convolution", "reparametrised")
# The kinds for an array that is not a matrix to quantize.
_no_matrices = ("vector", "bias", "norm", "state", "dtype", "not an array")


def check_unmet(
    request: Request, choices: Sequence[Choice], decisions: Sequence[Decision]
) -> None:
    """Checks whether the filter of a request names arrays with a format in vain. Raises
    a `ValueError` if the request is strict. Otherwise warns the caller of the function
    that makes a [`Plan`][]. `choices` and `decisions` are for each leaf of the model.
    """
    if request.strict is None:
        return
    for what, asked, named in _named(request.filter_spec, choices, decisions):
        named = [d for d in named if d.info is not None]
        left = [
            d
            for d in named
            if d.skip and (d.skip.kind not in _by_choice or _is_other(d, asked))
        ]
        if not left or any(_is_met(d) and not _is_other(d, asked) for d in named):
            continue
        message = _message(what, left, request.goal)
        if request.strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=5)


def _is_other(decision, asked):
    # A quantized array keeps its format.
    is_done = decision.skip is not None and decision.skip.kind == "quantized"
    if not is_done or not is_quantized(decision.leaf) or _is_true(asked):
        return False
    return decision.leaf.format != as_format(asked)


def _is_true(action):
    return isinstance(action, bool | np.bool_) and bool(action)


def _is_met(decision):
    kind = None if decision.skip is None else decision.skip.kind
    return kind is None or (kind in _by_choice and kind != "not requested")


def _named(spec, choices, decisions) -> Iterator[tuple[str, Any, list[Decision]]]:
    # Yields each part of the filter that asks for a format, the format, and its arrays.
    if isinstance(spec, Rules):
        for rule in spec.rules:
            condition, action = rule
            if action is None or action is False or is_every(rule):
                continue
            if any(choice.rule is rule for choice in choices):
                # (A function is called only on leaves that no earlier rule has taken.)
                shared = isinstance(condition, str)
                found = [
                    d
                    for d, choice in zip(decisions, choices, strict=True)
                    if d.info
                    and (choice.rule is rule or shared and matches(rule, d.info))
                ]
                yield f"the rule {condition!r} {_asks(action)}", action, found
        return
    groups = {}
    for choice, decision in zip(choices, decisions, strict=True):
        if isinstance(choice.value, AbstractFormat | str) and choice.named:
            groups.setdefault(id(choice), (choice, []))[1].append(decision)
    for choice, found in groups.values():
        if not all(d.skip and d.skip.kind in _no_matrices for d in found):
            yield f"a place {_asks(choice.value)}", choice.value, found


def _message(what, left, goal):
    left = sorted(left, key=lambda d: d.skip.kind in _no_matrices)
    skips = [(d.info.path or "(root)", d.skip) for d in left]
    lines = [f"\n- `{path}`: {skip.reason}." for path, skip in skips[:3]]
    lines += [f"\n- and {len(skips) - 3} more."] if len(skips) > 3 else []
    hints = dict.fromkeys(skip.hint for _, skip in skips if skip.hint)
    ways = [f"{hint}." for hint in hints]
    if any(skip.kind in by_use for _, skip in skips):
        ways.append("Or pass `example=`, the arguments of a call.")
    if any(skip.kind == "quantized" for _, skip in skips):
        ways.append("To round it again, pass `eqquant.tree_dequantize(model)`.")
    ways = ways or ["Leave it out, by None."]
    return (
        f"In `filter_spec`, {what} where nothing can be {goal}:{''.join(lines)}\n"
        f"{' '.join(ways)}"
    )


def _asks(action):
    return "selects arrays" if _is_true(action) else f"asks for {action}"
