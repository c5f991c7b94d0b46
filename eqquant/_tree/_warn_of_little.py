import math
import warnings
from collections.abc import Sequence

import jax.tree_util as jtu
from jaxtyping import PyTree

from ..formats import AbstractFormat
from ._decide import FilterSpec
from ._decision import Decision
from ._unmet import by_use


def warn_of_little(
    model: PyTree,
    filter_spec: FilterSpec,
    decisions: Sequence[Decision],
    traceable: bool,
) -> None:
    """Warns the caller of `tree_quantize`, or of a similar function, if less than half
    of a model's matrices are quantized because their use is unknown or not supported.

    **Arguments:**

    - `traceable`: whether an `example` could show how the model uses them.
    """
    every = filter_spec is True or isinstance(filter_spec, AbstractFormat | str)
    if every and callable(model) and jtu.all_leaves([model]):
        warnings.warn(
            f"Nothing is quantized: `model` is a function of type "
            f"{type(model).__name__}, whose arrays cannot be seen. Quantize the module "
            "that it was made from.",
            stacklevel=3,
        )
        return
    arrays = [(d.info, d.skip) for d in decisions if d.info is not None]
    left = [(info, s) for info, s in arrays if s is not None and s.kind in by_use]
    done = [info for info, s in arrays if s is None or s.kind == "quantized"]
    numbers = lambda infos: sum(math.prod(info.shape) for info in infos)
    quantized, dense = numbers(done), numbers(info for info, _ in left)
    if dense <= quantized:
        return
    if done:
        share = quantized / (quantized + dense)
        start = f"Only {share:.0%} of the numbers in matrices are quantized."
    else:
        start = "Nothing is quantized."
    lines = [
        f"\n- `{info.path}`: {s.reason}.{f' {s.hint}.' if s.hint else ''}"
        for info, s in left
    ]
    more = f"\n- and {len(lines) - 3} more." if len(lines) > 3 else ""
    way = ". Pass `example=`, the arguments of a call, to take them"
    warnings.warn(
        f"{start} How the model uses these matrices is not known, or their layers need "
        f"dense arrays{way if traceable else ''}:{''.join(lines[:3])}{more}",
        stacklevel=3,
    )
