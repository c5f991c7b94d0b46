import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any, Literal

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from ..._array import check_number
from ..._product import as_tuple, Axis, normalise_axis
from ..._tree import LeafInfo, Rules
from ...formats import AbstractFormat, as_format
from .._checkpoint import Checkpoint, Entry
from .._contracted import contracted_by_shape, few


# The names of dtypes, which decode arrays instead of quantizing them.
_dense = {
    "f32": np.dtype(np.float32),
    "f16": np.dtype(np.float16),
    "bf16": np.dtype(ml_dtypes.bfloat16),
}
_quantized_already = "quantized already"
# Files have no modules, so embeddings and norms are recognized by their names.
_embedding = re.compile(r"(?<![a-z])(emb|wte|wpe)")
_norm = re.compile(r"norm|(^|[._])ln_")


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan for an array of a checkpoint.

    - `format`, `axis`: the format and the axis to quantize it with. `format` is `None`
        if it is not quantized.
    - `dtype`: the dtype of an array that becomes dense. `None` to copy it unchanged.
    - `reason`, `hint`: why it is not quantized, and how to change that.
    """

    entry: Entry
    format: AbstractFormat | None
    axis: Axis
    dtype: np.dtype | None = None
    reason: str = ""
    hint: str = ""

    @property
    def name(self) -> str:
        return self.entry.name

    @property
    def size(self) -> int:
        return math.prod(self.entry.shape)

    @property
    def nbytes(self) -> int:
        """The size of the array in bytes when it is not quantized."""
        return self.size * self.entry.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of [`eqquant.interop.convert`][] for an array.

    - `name`, `shape`, `dtype`: the name, the shape and the dtype in the source.
    - `format`: the format in the output. `None` if it is not quantized.
    - `axis`: the contracted axis.
    - `before`, `after`: its size in bytes when it is not quantized, and in the output.
    - `sqnr`: the signal-to-quantization-noise ratio in decibels, if it was quantized.
    - `reason`, `hint`: why it was not quantized, and how to change that.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    format: str | None
    axis: Any
    before: int
    after: int
    sqnr: float | None
    reason: str
    hint: str

    @property
    def bits_per_weight(self) -> float:
        """The bits per weight in the output, including scales."""
        return 8 * self.after / max(1, math.prod(self.shape))


def outcome(planned: Planned, after: int, sqnr: float | None) -> Outcome:
    entry = planned.entry
    kept = planned.format is None
    stays = kept and planned.dtype is None
    format = entry.format if stays else planned.format
    return Outcome(
        name=planned.name,
        shape=entry.shape,
        dtype=entry.dtype.name,
        format=None if format is None else str(format),
        axis=entry.axis if kept else planned.axis,
        before=planned.nbytes,
        after=after,
        sqnr=sqnr,
        reason=planned.reason,
        hint=planned.hint,
    )


def plan(
    checkpoint: Checkpoint,
    format: AbstractFormat | str | None,
    rules: Sequence[tuple[Any, Any]],
    axis: int | Literal["auto"] | Sequence[tuple[Any, Axis]],
    min_size: int,
    embeddings: bool,
    requantize: bool,
) -> list[Planned]:
    """Returns the plan for each array. The arguments are as in
    [`eqquant.interop.convert`][]. Raises a `ValueError` if a rule matches nothing, if
    an axis is invalid for an array, or unknown where a rule gives a format, if an array
    cannot be read, or if all arrays to quantize are quantized already."""
    check_number("min_size", min_size)
    if format is not None:
        format = _dense_dtype(format) or as_format(format)
    dtypes = [_dense_dtype_of_rule(rule) for rule in rules]
    found = Rules([(rule[0], True) if d else rule for rule, d in zip(rules, dtypes)])
    chosen = {id(rule): d or rule[1] for rule, d in zip(found.rules, dtypes)}
    axes = _axes(checkpoint, axis)
    infos = [_info(entry, axes[name]) for name, entry in checkpoint.entries.items()]
    planned = []
    for (name, entry), rule in zip(
        checkpoint.entries.items(), found.assign(infos, "rules")
    ):
        _check_known(entry)
        asked: Any = format if rule is None else chosen[id(rule)]
        if asked is True or asked is False:
            asked = format if asked else None
        obstacle = _obstacle(
            entry, asked, rule, axes[name], min_size, embeddings, requantize
        )
        if obstacle is not None:
            reason, hint = obstacle
            planned.append(Planned(entry, None, entry.axis, None, reason, hint))
        elif isinstance(asked, AbstractFormat):
            # Files store codes in the packing for CPUs.
            along = _contracted(entry, axes[name])
            planned.append(Planned(entry, asked.prepacked("cpu"), along))
        else:
            reason = f"{asked.name}, as requested"
            planned.append(Planned(entry, None, entry.axis, asked, reason))
    _check_some(planned)
    return planned


def _dense_dtype(action):
    return _dense.get(action.lower()) if isinstance(action, str) else None


def _dense_dtype_of_rule(rule):
    is_pair = isinstance(rule, tuple | list) and len(rule) == 2
    return _dense_dtype(rule[1]) if is_pair else None


def _check_some(planned):
    # Refuse to quantize nothing: the output would be a mere copy.
    kept = [p for p in planned if p.reason == _quantized_already and p.hint]
    if kept and all(p.format is None and p.dtype is None for p in planned):
        raise ValueError(
            f"All arrays to quantize ({len(kept)}) are quantized already, such as "
            f"{kept[0].name!r} in {kept[0].entry.format}. Pass `requantize` (the "
            "option --requantize) to quantize them again, or None as the format "
            "(--format none) to copy them as they are."
        )


def _axes(checkpoint, axis):
    # Returns the given or known axis of each array, or `None` if its shape must decide.
    is_one = isinstance(axis, int | str)
    pairs = [] if is_one else list(axis)
    default = axis if is_one and axis != "auto" else None
    for i in [i for _, i in pairs] if default is None else [default]:
        if i not in (-1, -2) and not isinstance(i, tuple):
            raise ValueError(
                "`axis` should be -1, -2, or the tuple of all axes that a convolution "
                f"contracts, such as (1, 2, 3). Got {i!r}."
            )
    # The first pair that matches a name decides, like rules.
    rules = Rules([(pattern, True) for pattern, _ in pairs])
    axes = {id(rule): i for rule, (_, i) in zip(rules.rules, pairs)}
    infos = [_info(entry, -1) for entry in checkpoint.entries.values()]
    found = rules.assign(infos, "axis")
    given = [default if rule is None else axes[id(rule)] for rule in found]
    entries = checkpoint.entries.values()
    return {e.name: _known(e) if i is None else i for e, i in zip(entries, given)}


def _known(entry):
    # Returns the axis of a quantized array. (If blocks go over the whole array, all
    # axes count as contracted, which does not determine the axes that products
    # contract.)
    if entry.format is None or len(as_tuple(entry.axis)) == len(entry.shape):
        return None
    return entry.axis


def _info(entry, axis):
    *_, field = entry.name.split(".")
    shape, dtype = entry.shape, entry.dtype
    known = axis is not None
    return LeafInfo(entry.name, None, field, shape, dtype, axis or -1, known, ())


def _contracted(entry, axis):
    axis = contracted_by_shape(entry.shape) if axis is None else axis
    if axis is None:
        name, last = entry.name, tuple(range(1, len(entry.shape)))
        raise ValueError(
            f"The axes of {name!r} that products contract do not follow from its shape "
            f"{entry.shape}. Pass them as `axis`: [({name!r}, -1)] for a stack of "
            f"(out, in) matrices, or [({name!r}, {last})] for the filter of a "
            f"convolution (--axis '{name}=-1', or --axis "
            f"'{name}={','.join(map(str, last))}')."
        )
    try:
        axis = normalise_axis(axis, entry.shape)
    except ValueError as e:
        raise ValueError(f"Could not convert {entry.name!r}: {e}") from e
    if isinstance(axis, tuple) and len(axis) == len(entry.shape):
        raise ValueError(
            f"Could not convert {entry.name!r}: `axis` should leave out the axis of "
            f"the outputs. Got {axis} for an array of shape {entry.shape}."
        )
    return axis


def _check_known(entry):
    entry.check()
    if entry.format is None and (
        entry.layout != "dense" or any(s.dtype is None for s in entry.sources)
    ):
        kinds = ", ".join(sorted({source.kind for source in entry.sources}))
        raise ValueError(f"{entry.name!r} is of {kinds}, which cannot be read.")


def _obstacle(entry, asked: Any, rule, axis, min_size, embeddings, requantize):
    is_packed, decodes = entry.format is not None, isinstance(asked, np.dtype)
    if decodes and (is_packed or rule is not None):
        return _not_floating(entry)
    found = _never(entry) or _unmatched(asked, rule)
    if found is None and rule is None:
        found = _exception(entry, axis, min_size, embeddings)
    if not is_packed or requantize:
        return found
    if found or entry.format == asked.prepacked("cpu"):
        return _quantized_already, ""
    return _quantized_already, "Pass `requantize`"


def _never(entry):
    # Returns the reasons that no rule overrides.
    if (found := _not_floating(entry)) is not None:
        return found
    if len(entry.shape) < 2:
        return "a vector", ""
    return ("empty", "") if 0 in entry.shape else None


def _not_floating(entry):
    if jnp.issubdtype(entry.dtype, jnp.floating):
        return None
    return f"{entry.dtype.name}, not floating-point", ""


def _unmatched(requested, rule):
    if requested is not None:
        return None
    if rule is None:
        return "no rule matches", ""
    return f"left out by the rule {rule[0]!r}", ""


def _exception(entry, axis, min_size, embeddings):
    *_, field = entry.name.split(".")
    if field.startswith("bias"):
        return "a bias", "A rule"
    if _norm.search(entry.name):
        return "a parameter of a norm, by its name", "A rule"
    if not isinstance(axis, tuple):
        is_narrow = entry.shape[axis or -1] < few
        if len(entry.shape) > 3 or len(entry.shape) == 3 and is_narrow:
            return "the filter of a convolution, by its shape", "A rule"
        if is_narrow:
            return f"fewer than {few} numbers along the contracted axis", "A rule"
    if math.prod(entry.shape) < min_size:
        return f"fewer than {min_size} numbers", "Pass `min_size`, or a rule"
    if _embedding.search(entry.name) and not embeddings:
        return "an embedding, by its name", "Pass `embeddings`, or a rule"
    return None
