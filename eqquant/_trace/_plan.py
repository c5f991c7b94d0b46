from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ._capture import Slot
from ._uses import Site


class Plan(NamedTuple):
    """Which sums to make.

    - `lead`: the leading axes of each sum.
    - `shared`: the slots of leaves, each with the one whose sum is also theirs.
    - `incomplete`: for leaves of which some products cannot be summed, why.
    """

    lead: dict[Slot, tuple[int, ...]]
    shared: dict[Slot, Slot]
    incomplete: dict[int, str]


def plan(sites: Sequence[Sequence[Site]], others: Sequence[Sequence[str]]) -> Plan:
    """Plans the sums for some leaves, from what `walk` found of them."""
    leads, shared, incomplete, known = {}, {}, {}, {}
    for leaf, (found, names) in enumerate(zip(sites, others, strict=True)):
        partly = [name for name in names if name in _summed]
        if partly:
            incomplete[leaf] = f"`{partly[0]}` contracts a part of an axis"
        lost = [name for name in names if name in _opaque]
        if lost and found:
            incomplete[leaf] = f"what becomes of it in a `{lost[0]}` is not known"
        for contracted in dict.fromkeys(site.product.contracted for site in found):
            some = [site for site in found if site.product.contracted == contracted]
            lead = _joint([site.lead for site in some])
            if lead is None:
                incomplete[leaf] = "which inputs meet which matrix is not known"
                continue
            slot = leaf, contracted
            # One sum for all that meet the same inputs, at the same times.
            key = tuple(
                (s.product.input, s.lead, tuple(i.value for i in s.at), s.inside)
                for s in some
            )
            shared[slot] = known.setdefault((key, lead), slot)
            if shared[slot] == slot:
                leads[slot] = lead
    return Plan(leads, shared, incomplete)


_opaque = ("cond", "scan", "shard_map", "while")
_summed = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def _joint(leads):
    if None in leads:
        return None
    sizes = [tuple(map(int, np.unique(each))) for each in zip(*leads)]
    divides = all(b % a == 0 for each in sizes for a, b in zip(each, each[1:]))
    return tuple(each[-1] for each in sizes) if divides else None
