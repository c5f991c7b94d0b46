import dataclasses

import jax.random as jr

from ._model import LanguageModel


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What there is to say of a model and of its training, but for the text."""

    width: int
    depth: int
    heads: int
    window: int
    batch: int
    steps: int
    learning_rate: float
    seed: int = 0

    def untrained(self) -> LanguageModel:
        key = jr.key(self.seed)
        return LanguageModel(self.width, self.depth, self.heads, key=key)


# About a minute, and ten seconds, on two cores.
full = Recipe(
    width=128,
    depth=3,
    heads=4,
    window=128,
    batch=4,
    steps=3000,
    learning_rate=3e-3,
)
quick = dataclasses.replace(full, depth=2, steps=120, learning_rate=4e-3)
