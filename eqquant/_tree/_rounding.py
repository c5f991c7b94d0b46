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
    another model. Warns of leaves in a format that the method does not apply to, if it
    does to the format of another.
    """
    if stats is None and method is None:
        return lambda leaf, format, axis: quantize(leaf, format, axis=axis)
    # (Imported here, so that `import eqquant` is quick.)
    from .._solvers import GPTQ

    check(stats, method)
    method = GPTQ() if method is None else method
    refused = _refused(decisions, method)
    solved = [d for d in decisions if d.format is None or d.format not in refused]
    otherwise = "`ScaleSearch()` rounds it" if method.needs_gram else None
    grams = {} if stats is None else grams_of(solved, stats, otherwise, 5)

    def round(leaf, format, axis):
        by = None if format in refused else method
        return rounded(leaf, format, axis, by, grams.get(identity(leaf)))

    return round


def _refused(
    decisions: Sequence[Decision], method: "AbstractMethod"
) -> frozenset[AbstractFormat]:
    """The formats that the method does not apply to, with a warning. None if it applies
    to no format at all: what is asked for cannot be done, and that is an error."""
    chosen = [(d.info, d.format) for d in decisions]
    chosen = [(info, f) for info, f in chosen if info is not None and f is not None]
    left = [(info, f) for info, f in chosen if not method.applies(f)]
    if not left or len(left) == len(chosen):
        return frozenset()
    _warn(
        [info.path for info, _ in left],
        f"is rounded to nearest: `method` {method} has no scales to choose in "
        f"{left[0][1]}.",
        5,
    )
    return frozenset(f for _, f in left)


def check(stats: Any, method: Any) -> None:
    """Raises a `TypeError` if these are not statistics or not a method, nor `None`; and
    a `ValueError` for a method that needs statistics, if there are none."""
    from .._solvers import AbstractMethod
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
    if stats is None and method is not None and method.needs_gram:
        raise ValueError(
            f"`method` {method} needs what the weights are multiplied with. Pass "
            "`stats=eqquant.calibrate(fn, model, batches)`."
        )


def rounded(
    leaf: Any,
    format: AbstractFormat,
    axis: Axis,
    method: "AbstractMethod | None",
    gram: "Gram | None",
) -> QuantizedArray:
    """Quantizes a leaf by a method; by `ScaleSearch()` if the method needs a Gram and
    there is none."""
    from .._solvers import ScaleSearch, solved

    if method is None:
        return quantize(leaf, format, axis=axis)
    if gram is None:
        method = ScaleSearch() if method.needs_gram else method
        return solved(leaf, format, method, axis=axis)
    return solved(leaf, format, method, gram.value, gram.rows, axis=axis)


def grams_of(
    decisions: Sequence[Decision],
    stats: "Statistics",
    otherwise: str | None,
    stacklevel: int,
) -> "dict[Any, Gram]":
    """The Grams of the leaves that are to be quantized, by their identities.

    **Arguments:**

    - `otherwise`: what becomes of a leaf that the statistics do not know, for the
        warning. `None` to warn of nothing.
    - `stacklevel`: whose call the warning is about, as of `warnings.warn`.

    **Raises:**

    A `ValueError` if the statistics are of another model.
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
    if otherwise is not None:
        few = {*stats.few_rows}
        _warn(
            [path for path in known if path in few],
            "met fewer rows than inputs while calibrating, so the statistics say "
            "little. Calibrate with more batches.",
            stacklevel,
        )
        _warn(
            unknown,
            "entered no product that `calibrate` could follow, so `stats` does not "
            f"know it, and {otherwise}.",
            stacklevel,
        )
    return grams


def _warn(paths, what, stacklevel):
    if paths:
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        warnings.warn(f"`{paths[0]}`{more} {what}", stacklevel=stacklevel)
