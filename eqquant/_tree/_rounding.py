import warnings
from collections.abc import Callable, Sequence
from typing import Any, TYPE_CHECKING

import jax

from .._array import identity, quantize, QuantizedArray
from .._product import as_tuple, Axis, normalise_axis
from ..formats import AbstractFormat
from ._decide import Decision


if TYPE_CHECKING:
    from .._solvers import AbstractMethod
    from .._trace import Gram, Statistics


Round = Callable[[Any, AbstractFormat, Axis], QuantizedArray]


def rounding(
    decisions: Sequence[Decision],
    stats: "Statistics | None",
    method: "AbstractMethod | None",
) -> Round:
    """How the leaves that are to be quantized are rounded: `(leaf, format, axis)` to a
    quantized array.

    **Raises:**

    A `ValueError` if the method needs statistics and there are none, or if they are of
    another model.
    """
    if stats is None and method is None:
        return lambda leaf, format, axis: quantize(leaf, format, axis=axis)
    # (Imported here, so that `import eqquant` is quick.)
    from .._solvers import AbstractMethod, GPTQ, ScaleSearch, solved
    from .._trace import Statistics

    if stats is not None and not isinstance(stats, Statistics):
        raise TypeError(
            "`stats` should be what `eqquant.calibrate` returns. Got "
            f"{type(stats).__name__}."
        )
    if method is not None and not isinstance(method, AbstractMethod):
        raise TypeError(
            "`method` should be a method such as `GPTQ()`, or None. Got "
            f"{type(method).__name__}."
        )
    method = GPTQ() if method is None else method
    if stats is None and method.needs_gram:
        raise ValueError(
            f"`method` {method} needs what the weights are multiplied with. Pass "
            "`stats=eqquant.calibrate(fn, model, batches)`."
        )
    grams = {} if stats is None else grams_of(decisions, stats, method.needs_gram)
    without_gram = ScaleSearch() if method.needs_gram else method

    def solve(leaf, format, axis):
        gram = grams.get(identity(leaf))
        if gram is None:
            return solved(leaf, format, without_gram, axis=axis)
        return solved(leaf, format, method, gram.value, gram.rows, axis=axis)

    return solve


def grams_of(
    decisions: Sequence[Decision], stats: "Statistics", needed: bool
) -> "dict[Any, Gram]":
    """The Grams of the leaves that are to be quantized, by their identities.

    **Raises:**

    A `ValueError` if the statistics are of another model. Warns, if they are needed,
    of what they say little of.
    """
    grams, known, missing = {}, [], []
    for decision in decisions:
        info, leaf = decision.info, decision.leaf
        if info is None or decision.format is None:
            continue
        if isinstance(leaf, jax.ShapeDtypeStruct) or identity(leaf) in grams:
            # (An array in two places has the Gram of the first.)
            continue
        if info.path not in stats:
            missing.append((identity(leaf), info.path))
            continue
        axes = as_tuple(normalise_axis(info.axis, info.shape))
        axes = tuple(sorted(i + len(info.shape) for i in axes))
        try:
            grams[identity(leaf)] = stats[info.path, axes]
        except KeyError as e:
            raise ValueError(
                f"`stats` should know `{info.path}` along the axes {axes}, along which "
                f"it is quantized. {e.args[0]}"
            ) from e
        known.append(info.path)
    unknown = [path for leaf, path in missing if leaf not in grams]
    if unknown and not known:
        raise ValueError(
            "`stats` should be of this model: none of the weights that are quantized "
            f"are in it, such as `{unknown[0]}`. It knows {list(stats)}."
        )
    if needed:
        few = {*stats.few_rows}
        _warn(
            [path for path in known if path in few],
            "met fewer rows than inputs while calibrating, so the statistics say "
            "little. Calibrate with more batches.",
        )
        _warn(
            unknown,
            "entered no product that `calibrate` could follow, so `stats` does not "
            "know it, and `ScaleSearch()` rounds it.",
        )
    return grams


def _warn(paths, what):
    if paths:
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        warnings.warn(f"`{paths[0]}`{more} {what}", stacklevel=5)
