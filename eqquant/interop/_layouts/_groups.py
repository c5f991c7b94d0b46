import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ...formats import AbstractFormat, AbstractGrid
from .._containers import RawTensor
from ._base import check, Source


def group_size(name: str, configured: Sequence[Any], k: int, groups: int) -> int | None:
    """Returns the size of a group, or `None` if there is one group, in rows of `k`
    numbers with `groups` groups. `configured` are the sizes in the configuration.
    Raises a `ValueError` about the array of this name if no known size gives this
    number of groups."""
    if groups == 1:
        return None
    sizes = [size for size in configured if type(size) is int and size > 0]
    sizes += [k // groups] if groups > 0 and k % groups == 0 and k > 0 else []
    for size in sizes:
        if -(-k // size) != groups:
            continue
        if size % 16 != 0:
            raise ValueError(
                f"{name!r} has groups of {size}, which is not a multiple of 16."
            )
        return size
    raise ValueError(
        f"{name!r} has {groups} scales for {k} numbers, which are not groups of "
        f"{' or '.join(map(str, sizes)) or 'a known size'}."
    )


def group_index(source: Source, name: str, k: int) -> RawTensor | None:
    """Returns the tensor with the group of each position of an array of
    compressed-tensors, if there is one."""
    g_idx = source.get(f"{name}_g_idx", "I32", "I64")
    check_there(g_idx, name, f"{name}_g_idx", says(source, "actorder", "group"))
    check(
        g_idx is None or g_idx.shape == (k,),
        f"{name!r} should have a group for each of {k} positions",
        g_idx,
    )
    return g_idx


def check_there(tensor: RawTensor | None, name: str, part: str, says: str) -> None:
    """Raises a `ValueError` if a part of an array is missing that the configuration
    requires. `says` quotes the configuration, and is empty if the part is not required.
    """
    if tensor is None and says:
        raise ValueError(
            f"{name!r} should have {part!r}, of integers, as the configuration has "
            f"{says}."
        )


def says(source: Source, key: str, value: Any) -> str:
    """Returns the text of an option of compressed-tensors if all groups of layers have
    it, or else an empty string."""
    groups = source.config.get("config_groups")
    each = groups.values() if isinstance(groups, dict) else ()
    weights = [x.get("weights") for x in each if isinstance(x, dict)]
    found = [x.get(key) for x in weights if isinstance(x, dict)]
    has_it = bool(found) and all(x == value for x in found)
    return f"{key!r}: {value!r}" if has_it else ""


def is_ordered(g_idx: RawTensor | None, groups: int, size: int | None) -> bool:
    """Whether `g_idx`, the group of each position, is not in order (activation order).
    This reads the tensor. Raises a `ValueError` if a group does not exist."""
    if g_idx is None:
        return False
    index = g_idx.read()
    if np.all(index == -1):
        # Some writers allocate it, but never set it.
        return False
    if np.any((index < 0) | (index >= groups)):
        raise ValueError(f"{g_idx.name!r} should have groups from 0 to {groups - 1}.")
    in_order = np.arange(index.shape[-1]) // (size or max(index.shape[-1], 1))
    return not bool(np.all(index == in_order))


def has_zeros(format: AbstractFormat) -> bool:
    """Whether a format stores zero-points."""
    return isinstance(format, AbstractGrid) and format.offset == "zero_point"


def configured(source: Source, key: str) -> list[Any]:
    """Returns the values of an option in the configuration of compressed-tensors, one
    for each group of layers. Shapes decide which applies. (The configuration names
    layers by regular expressions, which could run forever in a hostile file.)"""
    groups = source.config.get("config_groups")
    found = [source.config.get(key)]
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):
            found.append(weights.get(key))
    return [value for value in found if value is not None]


class Blocks(NamedTuple):
    """The blocks of a matrix in which numbers share a scale."""

    # The number of rows that share a scale. `None` if all do.
    height: int | None
    # The number of columns that share a scale. `None` if all do.
    size: int | None
    # The number of scales for a row.
    groups: int

    def by_row(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
        """Expands one number per scale to numbers for each row of a weight."""
        *lead, n, _ = shape
        if self.height is None:
            # There is one number for all matrices, or one for each matrix.
            x = x.reshape((1,) * len(shape) if x.size == 1 else (*lead, 1, 1))
            return np.broadcast_to(x, (*lead, n, 1))
        x = x.reshape(*lead, -1, self.groups)
        return np.repeat(x, self.height, axis=-2)[..., :n, :]


def scale_blocks(
    source: Source, name: str, weight: RawTensor, scale: RawTensor
) -> Blocks:
    """Returns the blocks of an 8-bit weight that share a scale, from shapes and the
    configuration. Raises a `ValueError` if shapes and the configuration do not
    determine them."""
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
            1, group_size(name, configured(source, "group_size"), k, groups), groups
        )
    known = [
        *configured(source, "weight_block_size"),
        *configured(source, "block_structure"),
    ]
    for height, width in [*filter(_is_block, known), (128, 128)]:
        if (-(-n // height), -(-k // width)) == (rows, groups):
            return Blocks(height, group_size(name, [width], k, groups), groups)
    raise ValueError(
        f"{name!r} should have scales of blocks, whose size is in a 'config.json'. Got "
        f"{scale.name!r} {scale.shape}, for shape {weight.shape}."
    )


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, list)
        and len(block) == 2
        and all(type(size) is int and size > 0 for size in block)
    )
