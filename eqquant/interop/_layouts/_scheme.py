import math
from typing import Any, NamedTuple

import numpy as np

from .._containers import RawTensor
from ._base import check, Source
from ._groups import group_size


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
