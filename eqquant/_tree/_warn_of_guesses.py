import warnings
from collections.abc import Sequence
from typing import Any

from ._decision import Decision


# With fewer numbers along the contracted axis, most formats store about as many bits in
# scales as in codes.
_few = 16


def warn_of_guesses(decisions: Sequence[Decision], axis: Any) -> None:
    """Warns the caller of `tree_quantize`, or of a similar function, of arrays outside
    of modules, or in unregistered fields, whose contracted axis is a doubtful guess.

    **Arguments:**

    - `axis`: the argument `axis` of the caller.
    """
    if axis != "auto":
        return
    guesses = [_doubt(d.info) for d in decisions if d.format is not None]
    doubts = [doubt for doubt in guesses if doubt is not None]
    if not doubts:
        return
    lines = "".join(f"\n- {doubt}" for doubt in doubts[:3])
    more = f"\n- and {len(doubts) - 3} more." if len(doubts) > 3 else ""
    warnings.warn(
        "The axis that products contract is a guess for arrays outside of modules, and "
        "for fields that are not registered. Pass `example=`, the arguments of a call "
        "or `(fn, args)`, to find it; or `axis=`, if the guess is right:"
        f"{lines}{more}",
        stacklevel=3,
    )


def _doubt(info):
    if info.owner is not None and info.known:
        return None
    if info.multiplied is not None:
        return None
    where = f"`{info.path or '(root)'}`, of shape {info.shape}, along axis {info.axis}"
    if info.shape[info.axis] < _few:
        return f"{where}: few numbers for a scale."
    if "embed" in info.path.split(".")[-1]:
        return f"{where}: by its name, a table of embeddings."
    return None
