from collections.abc import Sequence
from typing import Any

import numpy as np

from .._containers import RawTensor


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
