import math
import warnings
from collections.abc import Sequence

import jax.tree_util as jtu

from ..formats import AbstractFormat
from ._decision import Decision
from ._request import Request
from ._unmet import by_use


# With fewer numbers along the contracted axis, most formats store about as many bits in
# scales as in codes.
_few = 16


def warn_of_little(request: Request, decisions: Sequence[Decision]) -> None:
    """Warns the caller of the function that makes a [`Plan`][] if less than half of a
    model's matrices are quantized because their use is unknown or not supported, or
    because they are parts of weights in training."""
    model, filter_spec = request.model, request.filter_spec
    every = filter_spec is True or isinstance(filter_spec, AbstractFormat | str)
    if every and callable(model) and jtu.all_leaves([model]):
        warnings.warn(
            f"Nothing is quantized: `model` is a function of type "
            f"{type(model).__name__}, whose arrays cannot be seen. Quantize the module "
            "that it was made from.",
            stacklevel=4,
        )
        return
    arrays = [(d.info, d.skip) for d in decisions if d.info is not None]
    kinds = (*by_use, "held")
    left = [(info, s) for info, s in arrays if s is not None and s.kind in kinds]
    done = [info for info, s in arrays if s is None or s.kind == "quantized"]
    numbers = lambda infos: sum(math.prod(info.shape) for info in infos)
    quantized, dense = numbers(done), numbers(info for info, _ in left)
    if dense <= quantized:
        return
    if done:
        share = quantized / (quantized + dense)
        start = f"Only {share:.0%} of the numbers in matrices are quantized"
    else:
        start = "Nothing is quantized"
    if any(s.kind in by_use for _, s in left):
        start += (
            ". How the model uses these matrices is not known, or their layers need "
            "dense arrays"
        )
        if request.example is None:
            start += ". Pass `example=`, the arguments of a call, to take them"
    lines = [
        f"\n- `{info.path}`: {s.reason}.{f' {s.hint}.' if s.hint else ''}"
        for info, s in left
    ]
    more = f"\n- and {len(lines) - 3} more." if len(lines) > 3 else ""
    warnings.warn(f"{start}:{''.join(lines[:3])}{more}", stacklevel=4)


def warn_of_guesses(request: Request, decisions: Sequence[Decision]) -> None:
    """Warns the caller of `tree_quantize`, or of a similar function, of arrays outside
    of modules, or in unregistered fields, whose contracted axis is a doubtful guess."""
    if request.axis != "auto":
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
