import dataclasses
from typing import Any, Literal

from ..formats import AbstractFormat
from ._owners import LeafInfo, Owner


@dataclasses.dataclass(frozen=True)
class Skip:
    """Why a leaf is left as it is.

    - `kind`: the reason as a word, to branch on.
    - `reason`: the reason as text, to print.
    - `hint`: what would change that, or nothing.
    """

    kind: Literal[
        "not an array",
        "quantized",
        "dtype",
        "not requested",
        "reparametrised",
        "norm",
        "state",
        "vector",
        "bias",
        "convolution",
        "adapter",
        "small",
        "embedding",
        "unknown owner",
    ]
    reason: str
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of a leaf.

    - `leaf`, `info`: the leaf, and what is known of it. `info` is `None` for a leaf
        that is not an array.
    - `outcome`: the format to quantize it in, or why it is left as it is.
    - `on_call`: the modules whose calls then have to run as by `implicit`.
    - `named`: whether the filter is about this leaf in particular: by a place of a
        prefix, or by a rule other than `*`, which asks for whatever can be had.
    """

    leaf: Any
    info: LeafInfo | None
    outcome: AbstractFormat | Skip
    on_call: tuple[Owner, ...] = ()
    named: bool = False

    @property
    def format(self) -> AbstractFormat | None:
        return None if isinstance(self.outcome, Skip) else self.outcome

    @property
    def skip(self) -> Skip | None:
        return self.outcome if isinstance(self.outcome, Skip) else None
