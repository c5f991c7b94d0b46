import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...formats import AbstractFormat, AbstractGrid
from .._containers import RawTensor
from ._base import check, Source


def group_size(name: str, said: Sequence[Any], k: int, groups: int) -> int | None:
    """How many of `k` numbers each of their groups has. `None` if there is one group.

    **Arguments:**

    - `said`: what the configuration says, if anything.

    **Raises:**

    A `ValueError` if no size makes so many groups, or if it is not clear which.
    """
    if groups == 1:
        return None
    sizes = [size for size in said if type(size) is int and size > 0]
    sizes += [k // groups] if groups > 0 and k % groups == 0 and k > 0 else []
    for size in sizes:
        if -(-k // size) != groups:
            continue
        if size % 16 != 0:
            raise ValueError(
                f"{name!r} has groups of {size}. Those that can be read are of a "
                "multiple of 16."
            )
        return size
    raise ValueError(
        f"{name!r} has {groups} scales for {k} numbers, which are no groups of "
        f"{' or '.join(map(str, sizes)) or 'a size that is known'}."
    )


def is_ordered(g_idx: RawTensor | None, groups: int, size: int | None) -> bool:
    """Whether the groups of positions are given one by one, and are not one group after
    the other. This reads them.

    **Raises:**

    A `ValueError` if there is no such group.
    """
    if g_idx is None:
        return False
    index = g_idx.read()
    if np.all(index == -1):
        # It was made, but never set.
        return False
    if np.any((index < 0) | (index >= groups)):
        raise ValueError(f"{g_idx.name!r} should have groups from 0 to {groups - 1}.")
    in_order = np.arange(index.shape[-1]) // (size or max(index.shape[-1], 1))
    return not bool(np.all(index == in_order))


def has_zeros(format: AbstractFormat) -> bool:
    """Whether zero-points are stored."""
    return isinstance(format, AbstractGrid) and format.offset == "zero_point"


def said(source: Source, key: str) -> list[Any]:
    """What the configuration of compressed-tensors says about weights: of each of its
    groups of layers. Which layers those are is left open: it is said in regular
    expressions, that a file could make take forever; and the shapes tell it."""
    groups = source.config.get("config_groups")
    found = [source.config.get(key)]
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found.append(weights.get(key))
    return [value for value in found if value is not None]


class Blocks(NamedTuple):
    """What numbers of a matrix share a scale."""

    # How many rows share a scale. `None` if all do.
    height: int | None
    # How many columns. `None` if all do.
    size: int | None
    # How many scales there are to a row.
    groups: int

    def by_row(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """A number for each scale as numbers for each row of a weight."""
        *lead, n, _ = shape
        if self.height is None:
            # One of all matrices, or of each.
            x = x.reshape((1,) * len(shape) if x.size == 1 else (*lead, 1, 1))
            return np.broadcast_to(x, (*lead, n, 1))
        x = x.reshape(*lead, -1, self.groups)
        return np.repeat(x, self.height, axis=-2)[..., :n, :]


def scale_blocks(
    source: Source, name: str, weight: RawTensor, scale: RawTensor
) -> Blocks:
    """How scales belong to numbers of 8 bits: by their shapes, and by what the
    configuration says.

    **Raises:**

    A `ValueError` if that is not clear.
    """
    *lead, n, k = weight.shape
    if math.prod(scale.shape) == 1 or scale.shape in ((*lead,), (*lead, 1, 1)):
        return Blocks(None, None, 1)
    if scale.shape in ((*lead, n), (*lead, n, 1)):
        return Blocks(1, None, 1)
    check(
        scale.ndim == weight.ndim and scale.shape[:-2] == (*lead,),
        f"{name!r} should have a scale, or scales of rows, groups or blocks",
        *(weight, scale),
    )
    rows, groups = scale.shape[-2:]
    if rows == n:
        return Blocks(
            1, group_size(name, said(source, "group_size"), k, groups), groups
        )
    known = [*said(source, "weight_block_size"), *said(source, "block_structure")]
    for height, width in [*filter(_is_block, known), (128, 128)]:
        if (-(-n // height), -(-k // width)) == (rows, groups):
            return Blocks(height, group_size(name, [width], k, groups), groups)
    raise ValueError(
        f"{name!r} should have scales of blocks, of a size that is said by a "
        f"'config.json'. Got {scale.name!r} {scale.shape}, for shape {weight.shape}."
    )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )
