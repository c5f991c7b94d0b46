import dataclasses
from typing import Any, Literal

from ..formats import AbstractFormat
from ._owners import LeafInfo, Owner


@dataclasses.dataclass(frozen=True)
class Skip:
    """The reason why a leaf is not quantized.

    - `kind`: the reason as a word, to branch on.
    - `reason`: the reason as text, to print.
    - `hint`: how to have it quantized, or an empty string.
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
        "held",
        "small",
        "embedding",
        "unknown owner",
    ]
    reason: str
    hint: str = ""


@dataclasses.dataclass(frozen=True)
class Decision:
    """The outcome for a leaf.

    - `leaf`, `info`: the leaf, and its description. `info` is `None` for a leaf that is
        not an array.
    - `outcome`: the format to quantize it in, or the reason why it is not quantized.
    - `on_call`: the modules whose calls then have to run through `implicit`.
    - `named`: whether the filter names this leaf in particular: by a place of a prefix,
        or by a rule other than `*`, which selects all weights that can be quantized.
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
