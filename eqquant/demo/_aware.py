import jax.random as jr

from ..formats import AbstractFormat
from ..train import tree_fake_quantize, tree_freeze
from ._bar import Bar
from ._model import LanguageModel
from ._text import Text
from ._train import train
from ._trained import Recipe


def trained_for(
    format: AbstractFormat,
    model: LanguageModel,
    recipe: Recipe,
    text: Text,
    *,
    steps: int,
    bar: Bar,
) -> LanguageModel:
    """Trains a model further with its weights rounded to a format (quantization-aware
    training), and returns the packed model."""
    prepared = tree_fake_quantize(model, format)
    losses = train(
        prepared,
        text.train,
        steps=steps,
        batch=recipe.batch,
        window=recipe.window,
        learning_rate=recipe.learning_rate,
        key=jr.key(recipe.seed + 2),
    )
    bar.doing(f"compiling the training for {format}")
    for i, (prepared, value) in enumerate(losses):
        if i % 10 == 0:
            bar.doing(f"training for {format}, {float(value):.2f} nats/byte")
            bar.done(recipe.seconds_per_step * min(10, steps - i))
    return tree_freeze(prepared)
