import dataclasses
import math
from collections.abc import Hashable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import PyTree

from .._array import as_dense, identity, is_quantized, QuantizedArray, sqnr
from .._product import full_spec, names_of, spec_of
from .._tree import (
    by_use,
    decide,
    Decision,
    FilterSpec,
    LeafInfo,
    leaves_with_info,
    opened,
    why_held,
)
from ._print import print_report, Row, Total
from ._text import plain, short_array


@dataclasses.dataclass(frozen=True, repr=False)
class Report:
    """The size, the format and the error of each array of a model. It prints as a
    table; `rows` and `total` hold its data.

    If more than eight arrays differ only in the numbers in their paths, they are
    printed as one line, with `*` for these numbers, the sum of their bytes, and the
    lowest signal-to-quantization-noise ratio. Arrays that are dense for the same reason
    are merged likewise, if there are more than eight of them.
    """

    rows: list[Row]

    @property
    def total(self) -> Total:
        different = [row for row in self.rows if row.tied_to is None]
        return Total(
            arrays=len(different),
            quantized=sum(row.format is not None for row in different),
            size=sum(math.prod(row.shape) for row in different),
            before=sum(row.before for row in self.rows),
            after=sum(row.after for row in self.rows),
        )

    def __repr__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        return print_report(self.rows, self.total, options.max_width)


def report(
    model: PyTree,
    dense: PyTree | None = None,
    filter_spec: FilterSpec | None = None,
    *,
    min_size: int | None = None,
    example: Any = None,
) -> Report:
    """Lists the size of each array of a model, and how it is quantized, or why it is
    not.

    !!! Example

        ```python
        quantized = eqquant.tree_quantize(model)
        print(eqquant.report(quantized, model))
        ```

    **Arguments:**

    - `model`: any PyTree. Its arrays may be `jax.ShapeDtypeStruct`s, as made by
        `eqx.filter_eval_shape`.
    - `dense`: the model before it was quantized, for the error of each array. Arrays
        are dequantized one at a time for this.
    - `filter_spec`: as passed to [`eqquant.tree_quantize`][], so that the reasons refer
        to it.
    - `min_size`, `example`: likewise.

    **Returns:**

    A `Report`, which prints as a table. Its `rows` and its `total` hold the same as
    data.

    **Raises:**

    A `ValueError` if `dense` does not have the arrays of `model`.
    """
    filter_spec = True if filter_spec is None else filter_spec
    model, dense = opened(model), opened(dense)
    decisions = decide(
        model,
        filter_spec,
        min_size=1024 if min_size is None else min_size,
        strict=None,
        example=example,
    )
    arrays = [(d, d.info) for d in decisions if d.info is not None]
    if min_size is None and any(
        is_quantized(d.leaf) and math.prod(info.shape) < 1024 for d, info in arrays
    ):
        arrays = [(_of_unknown_size(d), info) for d, info in arrays]
    before: list[Any] = [decision.leaf for decision, _ in arrays]
    if dense is not None:
        before = originals(dense, model, [info for _, info in arrays])
    first: dict[Hashable, str] = {}
    counted = set()
    rows = []
    for (decision, info), original in zip(arrays, before, strict=True):
        row = _row(decision, info)
        if dense is not None and is_floating(info):
            ratio = sqnr(as_dense(original), as_dense(decision.leaf))
            row = dataclasses.replace(row, sqnr=ratio)
        tied_to = first.setdefault(identity(decision.leaf), info.path)
        if tied_to != info.path:
            row = dataclasses.replace(row, tied_to=tied_to, after=0)
        if identity(original) in counted:
            row = dataclasses.replace(row, before=0)
        counted.add(identity(original))
        rows.append(row)
    return Report(rows)


def _of_unknown_size(decision: Decision) -> Decision:
    # Smaller arrays are quantized, so `min_size` was not the default.
    skip = decision.skip
    if skip is None or skip.kind != "small":
        return decision
    skip = dataclasses.replace(skip, reason="fewer numbers than `min_size`")
    return dataclasses.replace(decision, outcome=skip)


def _row(decision: Decision, info: LeafInfo) -> Row:
    leaf = decision.leaf
    size = math.prod(info.shape)
    row = Row(
        path=info.path,
        shape=info.shape,
        dtype=info.dtype.name,
        format=None,
        activation=None,
        axis=None,
        bits_per_weight=8.0 * info.dtype.itemsize,
        before=size * info.dtype.itemsize,
        after=size * info.dtype.itemsize,
        sqnr=None,
        reason="",
        hint="",
        tied_to=None,
    )
    if isinstance(leaf, QuantizedArray):
        return dataclasses.replace(
            row,
            format=str(leaf.format),
            activation=None if leaf.activation is None else str(leaf.activation),
            axis=leaf.axis,
            bits_per_weight=leaf.bits_per_weight,
            after=leaf.nbytes,
            sharding=_sharding(leaf),
            declared=_declared(leaf),
            padding=leaf.layout.tail,
        )
    if decision.skip is None:
        hint = f"`tree_quantize` would store it in {decision.format}"
        return dataclasses.replace(row, reason="not quantized yet", hint=hint)
    skip = decision.skip
    hint = f"{skip.hint}, or `example=`" if skip.kind in by_use else skip.hint
    reason, hint = why_held(info) or (skip.reason, hint)
    return dataclasses.replace(row, reason=reason, hint=hint)


def _sharding(q: QuantizedArray) -> str | None:
    if not _is_placed(q) or not q.is_sharded:
        return None
    placement = q.placement
    return str(placement.spec if isinstance(placement, NamedSharding) else placement)


def _declared(q: QuantizedArray) -> str | None:
    # Only if it differs from the actual placement.
    if q.sharding is None or not _is_placed(q) or q.placement is None:
        return None
    spec = PartitionSpec(*(*[None] * q.ndim, *spec_of(q.sharding))[-q.ndim :])
    if isinstance(q.sharding, NamedSharding):
        declared = NamedSharding(q.sharding.mesh, spec)
        same = q.placement.is_equivalent_to(declared, q.ndim)
    else:
        placement, really = q.placement, PartitionSpec()
        if isinstance(placement, NamedSharding):
            really = placement.spec
        same = _names(full_spec(really, q.ndim)) == _names(spec)
    return None if same else str(spec)


def _names(spec):
    return [names_of(entry) for entry in spec]


def _is_placed(q):
    return all(isinstance(a, jax.Array) for a in jtu.tree_leaves(q.stored))


def originals(dense: PyTree, model: PyTree, infos: Sequence[LeafInfo]) -> list[Any]:
    """Returns the arrays of `dense` at the paths of the arrays of `model`. Raises a
    `ValueError` if the paths differ, or if either has `jax.ShapeDtypeStruct`s."""
    for keys, leaf in jtu.tree_leaves_with_path((model, dense)):
        if isinstance(leaf, jax.ShapeDtypeStruct):
            path = jtu.keystr(keys[1:], simple=True, separator=".")
            raise ValueError(
                "`dense` and `model` should both have arrays, to be compared. Got a "
                f"`jax.ShapeDtypeStruct` at `{path}`."
            )
    wanted = "`dense` should be the model as it was before it was quantized."
    arrays = [
        (leaf, info) for leaf, info in leaves_with_info(dense) if info is not None
    ]
    theirs = [info.path for _, info in arrays]
    ours = [info.path for info in infos]
    if theirs != ours:
        our, their = next((a, b) for a, b in zip_longest(ours, theirs) if a != b)
        path = their if our is None or our in theirs else our
        raise ValueError(f"{wanted} Got one whose paths first differ at `{path}`.")
    for (_, was), now in zip(arrays, infos):
        if was.shape != now.shape or is_floating(was) != is_floating(now):
            raise ValueError(
                f"{wanted} Got {_array(was)} at `{was.path}`, where `model` has "
                f"{_array(now)}."
            )
    return [leaf for leaf, _ in arrays]


def is_floating(info: LeafInfo) -> bool:
    return jnp.issubdtype(info.dtype, jnp.floating)


def _array(info: LeafInfo) -> str:
    return short_array(info.shape, info.dtype.name)
