import functools as ft
import hashlib
import inspect
import time

import equinox as eqx
import jax.random as jr
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from . import _adamw, _cache, _loss, _model, _train
from ._model import LanguageModel
from ._recipe import Recipe
from ._text import Text


def trained(
    recipe: Recipe, text: Text, *, fresh: bool, console: Console
) -> LanguageModel:
    """The model of a recipe: from this user's cache if it is there, or else trained now
    and kept there."""
    say = ft.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    path = _cache.folder() / f"demo-{_fingerprint(recipe, text)}.eqx"
    if path.exists() and not fresh:
        model = _cache.load(path, eqx.filter_eval_shape(recipe.untrained))
        if model is not None:
            say(f"Took the model from {path}; `--fresh` trains it anew.\n")
            return model
        say(f"{path} is damaged, so the model is trained anew.")
    say(f"Training a model on {text.train.size / 1e6:.1f} MB of Python's own source.")
    start = time.monotonic()
    model = _trained_now(recipe, text, console)
    say(f"That took {time.monotonic() - start:.0f} s.\n")
    try:
        _cache.save(path, model)
    except OSError as e:
        say(f"The model could not be kept for the next time: {e}.")
    return model


def _trained_now(recipe, text, console):
    progress = Progress(
        BarColumn(),
        TextColumn("{task.fields[loss]}"),
        TimeRemainingColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    model = recipe.untrained()
    steps = _train.train(
        model,
        text.train,
        steps=recipe.steps,
        batch=recipe.batch,
        window=recipe.window,
        learning_rate=recipe.learning_rate,
        key=jr.key(recipe.seed + 1),
    )
    with progress:
        task = progress.add_task("", total=recipe.steps, loss="compiling")
        for i, (model, value) in enumerate(steps, 1):
            # To read the loss is to wait for it.
            if i == 1 or i % 10 == 0:
                loss = f"{float(value):.2f} nats/byte"
                progress.update(task, completed=i, loss=loss)
    return model


def _fingerprint(recipe, text):
    # Of all that the trained model depends on, the code too.
    hash = hashlib.sha256(repr(recipe).encode())
    for module in (_adamw, _loss, _model, _train):
        hash.update(inspect.getsource(module).encode())
    hash.update(text.train)
    return hash.hexdigest()[:16]
