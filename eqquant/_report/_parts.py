from .._tree import LeafInfo
from ..train import FakeQuantized, LoRA, LowPrecision


def part_of(info: LeafInfo) -> tuple[str, str] | None:
    """Returns why an array of a weight in training is dense, and how to change that.
    Returns `None` for other arrays."""
    owner, field = info.owner, info.field
    if isinstance(owner, FakeQuantized):
        if field == "step_size":
            return "a step size, which trains", "`train.tree_freeze` packs it"
        return f"trains to be stored in {owner.format}", "`train.tree_freeze` packs it"
    if isinstance(owner, LoRA):
        if field == "base":
            return (
                "the base of an adapter, which is frozen",
                "Quantize it before `lora`",
            )
        if field != "norm":
            return (
                "of an adapter, which trains",
                "`train.merge_lora` adds it to its base",
            )
    for module in info.ancestors:
        if isinstance(module, LowPrecision):
            format, dtype = module.roundings.forward, module.dtype.name
            if owner is module.history:
                return "the history that sets the scales of the next steps", ""
            if module is not owner:
                return f"rounded to {format} by `train.tree_preround`", ""
            reason = f"trains in {dtype}; its products are computed in {format}"
            return reason, "`train.tree_freeze` packs it"
    return None
