from typing import NamedTuple

import numpy as np

from ._capture import Slot
from ._walk import Walked


class Plan(NamedTuple):
    """The sums to take.

    - `lead`: the leading axes of each sum.
    - `shared`: the slots of leaves, each with the slot whose sum it shares.
    - `incomplete`: for leaves with products that cannot be summed, the reason.
    - `changed`: the leaves whose numbers are changed before their products. Only the
        diagonal is summed: off-diagonal entries would be meaningless for them.
    """

    lead: dict[Slot, tuple[int, ...]]
    shared: dict[Slot, Slot]
    incomplete: dict[int, str]
    changed: frozenset[int]


def plan(walked: Walked, number: int) -> Plan:
    """Plans the sums for the first `number` leaves, from the result of a walk."""
    leads, shared, incomplete, known, changed = {}, {}, {}, {}, set()
    for leaf in range(number):
        found, names = walked.sites[leaf], walked.others[leaf]
        met = [s for s in walked.changed[leaf] if s.product.is_by_inputs]
        if met and not found:
            changed.add(leaf)
            found = met
        partly = [name for name in names if name in _summed]
        if partly:
            incomplete[leaf] = f"along which axes its `{partly[0]}` goes is not known"
        lost = [name for name in names if name in _opaque]
        if lost and found:
            incomplete[leaf] = f"what becomes of it in a `{lost[0]}` is not known"
        if any(not site.is_known for site in found):
            incomplete[leaf] = "which part of it some products contract is not known"
            found = [site for site in found if site.is_known]
        for contracted in dict.fromkeys(site.product.contracted for site in found):
            some = [site for site in found if site.product.contracted == contracted]
            lead = _joint([site.lead for site in some])
            if lead is None:
                incomplete[leaf] = "which inputs meet which matrix is not known"
                continue
            slot = leaf, contracted
            # One sum for all slots that meet the same inputs at the same times.
            key = tuple(
                (s.product.input, s.lead, tuple(i.value for i in s.at), s.inside)
                for s in some
            )
            shared[slot] = known.setdefault((key, lead, leaf in changed), slot)
            if shared[slot] == slot:
                leads[slot] = lead
    return Plan(leads, shared, incomplete, frozenset(changed))


_opaque = ("cond", "scan", "shard_map", "while")
_summed = ("dot_general", "conv_general_dilated", "ragged_dot_general")


def _joint(leads):
    if None in leads:
        return None
    sizes = [tuple(map(int, np.unique(each))) for each in zip(*leads)]
    divides = all(b % a == 0 for each in sizes for a, b in zip(each, each[1:]))
    return tuple(each[-1] for each in sizes) if divides else None
