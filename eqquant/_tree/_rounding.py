import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, TYPE_CHECKING

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._array import identity, once_per_array, quantize, QuantizedArray
from .._product import as_tuple, Axis, normalise_axis
from .._progress import Watched
from ..formats import AbstractFormat
from ._decision import Decision
from ._owners import LeafInfo
from ._skeleton import skeleton


if TYPE_CHECKING:
    from .._solvers import AbstractMethod
    from .._trace import Gram, Statistics


@dataclasses.dataclass(frozen=True, eq=False)
class Rounding:
    """How the leaves to quantize are rounded.

    - `method`: how numbers are rounded; to nearest by default.
    - `refused`: formats that the method does not apply to. They are rounded to nearest.
    - `grams`: the Grams of leaves, by their identities.
    - `done`: leaves that are quantized already, by their identities.
    """

    method: "AbstractMethod | None" = None
    refused: frozenset[AbstractFormat] = frozenset()
    grams: "Mapping[Any, Gram]" = dataclasses.field(default_factory=dict)
    done: Mapping[Any, QuantizedArray] = dataclasses.field(default_factory=dict)

    def __call__(self, leaf: Any, format: AbstractFormat, axis: Axis) -> QuantizedArray:
        """Quantizes a leaf. A skeleton becomes a skeleton."""
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return skeleton(leaf, format, axis)
        q = self.done.get(identity(leaf))
        if q is None:
            method = None if format in self.refused else self.method
            return rounded(leaf, format, axis, method, self.grams.get(identity(leaf)))
        sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
        return q.with_sharding(sharding) if isinstance(sharding, NamedSharding) else q

    def leaves(self, decisions: Sequence[Decision]) -> list[Any]:
        """Returns the leaves of the decisions, rounded to their formats. A terminal
        shows a progress bar."""
        quantize_once = once_per_array(self)
        leaves = [decision.leaf for decision in decisions]
        chosen = [
            (i, decision.info, decision.format)
            for i, decision in enumerate(decisions)
            if decision.info is not None and decision.format is not None
        ]
        path, size = lambda each: each[1].path, lambda each: math.prod(each[1].shape)
        bar, programs = Watched(chosen, "Quantizing", path, size), set()
        for i, info, format in bar:
            program = info.shape, format, info.axis
            if self.method is not None and not self.done and program not in programs:
                bar.note("compiling")
                programs.add(program)
            try:
                leaves[i] = quantize_once(leaves[i], format, info.axis)
            except ValueError as e:
                raise ValueError(f"Could not quantize `{info.path}`: {e}") from e
            # (So that the bar shows finished work, not work that was only dispatched.)
            _wait(leaves[i])
        return leaves


def _wait(leaf):
    for a in jtu.tree_leaves(leaf):
        if isinstance(a, jax.Array) and not isinstance(a, Tracer):
            a.block_until_ready()


def rounding(
    decisions: Sequence[Decision],
    stats: "Statistics | None",
    method: "AbstractMethod | None",
) -> Rounding:
    """Returns how the leaves to quantize are rounded. Raises a `ValueError` if the
    method needs statistics and there are none, or if they are of another model. Warns
    of leaves in a format that the method does not apply to, if it applies to another
    format."""
    if stats is None and method is None:
        return Rounding()
    # (Imported here, so that `import eqquant` is quick.)
    from .._solvers import GPTQ

    check(stats, method)
    method = GPTQ() if method is None else method
    refused = refused_formats(decisions, method, 6)
    solved = [d for d in decisions if d.format is None or d.format not in refused]
    grams = {} if stats is None else grams_of(solved, stats, otherwise(method), 6)
    return Rounding(method, refused, grams)


def refused_formats(
    decisions: Sequence[Decision], method: "AbstractMethod", stacklevel: int
) -> frozenset[AbstractFormat]:
    """Returns the formats that the method does not apply to, with a warning. Returns
    none if it applies to no format at all: then the request is an error."""
    chosen = [(d.info, d.format) for d in decisions]
    chosen = [(info, f) for info, f in chosen if info is not None and f is not None]
    left = [(info, f) for info, f in chosen if not method.applies(f)]
    if not left or len(left) == len(chosen):
        return frozenset()
    _warn(
        [info.path for info, _ in left],
        f"is rounded to nearest: `method` {method} has no scales to choose in "
        f"{left[0][1]}.",
        stacklevel,
    )
    return frozenset(f for _, f in left)


def check(stats: Any, method: Any) -> None:
    """Raises a `TypeError` if `stats` are not statistics or `method` is not a method,
    unless they are `None`; and a `ValueError` for a method that needs statistics, if
    there are none."""
    from .._trace import Statistics

    if stats is not None and not isinstance(stats, Statistics):
        raise TypeError(
            "`stats` should be what `eqquant.calibrate` returns. Got "
            f"{type(stats).__name__}."
        )
    check_method(method)
    if stats is None and method is not None and method.needs_gram:
        raise ValueError(
            f"`method` {method} needs what the weights are multiplied with. Pass "
            "`stats=eqquant.calibrate(fn, model, batches)`."
        )


def check_method(method: Any) -> None:
    """Raises a `TypeError` if this is neither a method nor `None`."""
    from .._solvers import AbstractMethod

    if method is not None and not isinstance(method, AbstractMethod):
        raise TypeError(
            "`method` should be a method such as `GPTQ()`, or None. Got "
            f"{type(method).__name__}."
        )


def check_alone(method: Any) -> None:
    """Raises a `ValueError` for a method that changes other arrays of the model, too,
    in a call that rounds weights one at a time."""
    from .._solvers import AWQ

    if isinstance(method, AWQ):
        raise ValueError(
            "`AWQ` scales other arrays, too, which takes a model: call "
            f"`eqquant.tree_quantize`, or pass `method={method.then}`."
        )


def rounded(
    leaf: Any,
    format: AbstractFormat,
    axis: Axis,
    method: "AbstractMethod | None",
    gram: "Gram | None",
) -> QuantizedArray:
    """Quantizes a leaf by a method; by `ScaleSearch()` if the method needs a Gram and
    there is none, or to nearest where that does not apply."""
    if method is None:
        return quantize(leaf, format, axis=axis)
    from .._solvers import ScaleSearch, solved

    if gram is None:
        other = ScaleSearch() if method.needs_gram else method
        if method.applies(format) and not other.applies(format):
            return quantize(leaf, format, axis=axis)
        return solved(leaf, format, other, axis=axis)
    return solved(leaf, format, method, gram.value, gram.rows, axis=axis)


def grams_of(
    decisions: Sequence[Decision],
    stats: "Statistics",
    otherwise: str | None,
    stacklevel: int,
) -> "dict[Any, Gram]":
    """Returns the Grams of the leaves to quantize, by their identities. Raises a
    `ValueError` if the statistics are of another model.

    - `otherwise`: how leaves without statistics are rounded, for the warning. `None`
        for no warning.
    - `stacklevel`: as in `warnings.warn`.
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
        axes = contracted_axes(info)
        try:
            grams[identity(leaf)] = stats.along(info.path, axes, info.shape)
        except KeyError as e:
            known = stats.contracted(info.path)
            raise not_along(info.path, axes, known, info.shape) from e
        known.append(info.path)
    unknown = [path for leaf, path in missing if leaf not in grams]
    if unknown and not known:
        raise ValueError(
            "`stats` should be of this model: none of the weights that are quantized "
            f"are in it, such as `{unknown[0]}`. It knows {list(stats)}."
        )
    few = {*stats.few_rows}
    warn([path for path in known if path in few], unknown, otherwise, stacklevel)
    return grams


def contracted_axes(info: LeafInfo) -> tuple[int, ...]:
    """Returns the axes that a leaf is quantized along, in ascending order, counted from
    the front."""
    axes = as_tuple(normalise_axis(info.axis, info.shape))
    return tuple(sorted(i + len(info.shape) for i in axes))


def not_along(
    path: str,
    axes: tuple[int, ...],
    known: Sequence[tuple[int, ...]],
    shape: tuple[int, ...],
) -> ValueError:
    """Returns the error for statistics of a weight along other axes."""
    first = [i - len(shape) for i in known[0]]
    axis = first[0] if len(first) == 1 else tuple(first)
    return ValueError(
        f"`stats` should know `{path}` along the axes {axes}, along which it is "
        f"quantized. Products contract it along {' and '.join(map(str, known))}: pass "
        f"`axis={axis}` for all weights, or `example=`, the arguments of a call, to "
        "find the axes of each."
    )


def otherwise(method: "AbstractMethod") -> str | None:
    """Returns how leaves with unknown inputs are rounded, for a warning, if they are
    rounded by another method."""
    return "`ScaleSearch()` rounds it" if method.needs_gram else None


def warn(
    few: Sequence[str], unknown: Sequence[str], otherwise: str | None, stacklevel: int
) -> None:
    """Warns of weights that met few rows, and of weights with unknown inputs, unless
    `otherwise` is `None`."""
    if otherwise is None:
        return
    _warn(
        few,
        "met fewer rows than inputs while calibrating, so the statistics are poor. "
        "Calibrate with more batches.",
        stacklevel + 1,
    )
    _warn(
        unknown,
        "entered no product that `calibrate` could follow, so `stats` does not know "
        f"it, and {otherwise}.",
        stacklevel + 1,
    )


def _warn(paths, what, stacklevel):
    if paths:
        more = f" (and {len(paths) - 1} more)" if len(paths) > 1 else ""
        warnings.warn(f"`{paths[0]}`{more} {what}", stacklevel=stacklevel)
