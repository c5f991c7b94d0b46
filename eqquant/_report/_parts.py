from typing import Any

from ..train import FakeQuantized, LoRA


def part_of(owner: Any, field: str) -> tuple[str, str] | None:
    """Why an array of an adapter or a fake-quantized weight is dense, and what would
    change that. `None` for other arrays."""
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
    return None
