import dataclasses
import math
import re
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from ..._product import Axis
from ..._tree import LeafInfo, Rules
from ...formats import AbstractFormat, as_format
from .._checkpoint import Checkpoint, Entry


# Files have only names, and no modules.
_embedding = re.compile(r"(?<![a-z])(emb|wte|wpe)")
_norm = re.compile(r"norm|(^|[._])ln_")


@dataclasses.dataclass(frozen=True)
class Planned:
    """The plan for an array of a checkpoint.

    - `format`, `axis`: those to quantize it with. `format` is `None` to copy it.
    - `reason`, `hint`: why it is not quantized, and how to change that.
    """

    entry: Entry
    format: AbstractFormat | None
    axis: Axis
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
        """Its size in bytes when it is not quantized."""
        return self.size * self.entry.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The result of [`eqquant.interop.convert`][] for an array.

    - `name`, `shape`, `dtype`: those in the source.
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
    format = entry.format if kept else planned.format
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
    axis: int | Sequence[tuple[Any, int]],
    min_size: int,
    embeddings: bool,
    requantize: bool,
) -> list[Planned]:
    """The plan for each array. The arguments are those of
    [`eqquant.interop.convert`][].

    **Raises:**

    A `ValueError` if a rule matches nothing, if an axis is not -1 or -2, or if an array
    cannot be read.
    """
    format = None if format is None else as_format(format)
    found = Rules(rules)
    axes = _axes(checkpoint, axis)
    infos = [_info(entry, axes[name]) for name, entry in checkpoint.entries.items()]
    planned = []
    for (name, entry), rule in zip(
        checkpoint.entries.items(), found.assign(infos, "rules")
    ):
        _check_known(entry)
        requested: Any = format if rule is None else rule[1]
        requested = format if requested is True else requested or None
        obstacle = _obstacle(entry, requantize) or _unmatched(requested, rule)
        if obstacle is None and rule is None:
            obstacle = _exception(entry, axes[name], min_size, embeddings)
        # Files have the packing of CPUs.
        requested = (
            None if obstacle or requested is None else requested.prepacked("cpu")
        )
        planned.append(Planned(entry, requested, axes[name], *(obstacle or ())))
    return planned


def _axes(checkpoint, axis):
    pairs = [] if isinstance(axis, int) else list(axis)
    default = axis if isinstance(axis, int) else -1
    for i in (default, *(i for _, i in pairs)):
        if i not in (-1, -2):
            raise ValueError(f"`axis` should be -1 or -2. Got {i!r}.")
    # The first of the pairs that matches a name decides, as of rules.
    rules = Rules([(pattern, True) for pattern, _ in pairs])
    axes = {id(rule): i for rule, (_, i) in zip(rules.rules, pairs)}
    infos = [_info(entry, -1) for entry in checkpoint.entries.values()]
    found = rules.assign(infos, "axis")
    return {
        info.path: default if rule is None else axes[id(rule)]
        for info, rule in zip(infos, found)
    }


def _info(entry, axis):
    *_, field = entry.name.split(".")
    shape, dtype = entry.shape, entry.dtype
    return LeafInfo(entry.name, None, field, shape, dtype, axis, True, ())


def _check_known(entry):
    if entry.format is None and (
        entry.layout != "dense" or any(s.dtype is None for s in entry.sources)
    ):
        kinds = ", ".join(sorted({source.kind for source in entry.sources}))
        raise ValueError(f"{entry.name!r} is of {kinds}, which cannot be read.")


def _obstacle(entry, requantize):
    # The reasons that no rule overrides.
    if entry.format is not None and not requantize:
        return "quantized already", "Pass `requantize`"
    if not jnp.issubdtype(entry.dtype, jnp.floating):
        return f"{entry.dtype.name}, not floating-point", ""
    if len(entry.shape) < 2:
        return "a vector", ""
    return ("empty", "") if 0 in entry.shape else None


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
    if len(entry.shape) > 3 or entry.shape[axis] < 16:
        return "the filter of a convolution, by its shape", "A rule"
    if math.prod(entry.shape) < min_size:
        return f"fewer than {min_size} numbers", "Pass `min_size`, or a rule"
    if _embedding.search(entry.name) and not embeddings:
        return "an embedding, by its name", "Pass `embeddings`, or a rule"
    return None
