import dataclasses
import functools as ft
import hashlib
import inspect
import io
import os
import pathlib
import sys
import time
from typing import ClassVar

import equinox as eqx
import jax.random as jr
from jaxtyping import PyTree
from rich.console import Console

from . import _model, _train
from ._bar import Bar
from ._model import LanguageModel
from ._text import Text


@dataclasses.dataclass(frozen=True)
class Recipe:
    """The size of a model, and the hyperparameters of its training."""

    width: int
    depth: int
    heads: int
    window: int
    batch: int
    steps: int
    learning_rate: float
    seed: int = 0
    seconds_to_compile: ClassVar[float] = 4.0

    @property
    def seconds(self) -> float:
        """The approximate training time on two cores."""
        return self.seconds_to_compile + self.steps * self.seconds_per_step

    @property
    def seconds_per_step(self) -> float:
        return 7e-3 * self.depth

    def untrained(self) -> LanguageModel:
        key = jr.key(self.seed)
        return LanguageModel(self.width, self.depth, self.heads, key=key)


full = Recipe(
    width=128,
    depth=3,
    heads=4,
    window=128,
    batch=4,
    steps=3000,
    learning_rate=3e-3,
)
"""The recipe of [`eqquant.demo.run_calibrated`][]. [`eqquant.demo.run`][] uses one with
fewer layers and steps."""

short = dataclasses.replace(full, depth=2, steps=1000)
quick = dataclasses.replace(full, depth=2, steps=120, learning_rate=4e-3)


def trained(
    recipe: Recipe, text: Text, *, fresh: bool, console: Console, bar: Bar
) -> LanguageModel:
    """Returns the trained model of a recipe. It is loaded from the user's cache, or
    trained and saved there."""
    write = ft.partial(console.print, markup=False, highlight=False, soft_wrap=True)
    path = folder() / f"demo-{_fingerprint(recipe, text)}.eqx"
    if path.exists() and not fresh:
        model = load(path, eqx.filter_eval_shape(recipe.untrained))
        if model is not None:
            write(f"Loaded the model from {path}; `--fresh` trains it again.\n")
            bar.less(recipe.seconds)
            return model
        write(f"{path} is damaged: training the model again.")
    write(f"Training a model on {text.train.size / 1e6:.1f} MB of Python's own source.")
    start = time.monotonic()
    model = recipe.untrained()
    model = train_further(model, recipe, text, recipe.steps, bar, seed=recipe.seed + 1)
    bar.done(recipe.seconds_to_compile)
    write(f"Training took {time.monotonic() - start:.0f} s.\n")
    try:
        save(path, model)
    except OSError as e:
        write(f"The model could not be saved for the next run: {e}.")
    return model


def train_further(
    model: LanguageModel,
    recipe: Recipe,
    text: Text,
    steps: int,
    bar: Bar,
    *,
    seed: int,
    what: str = "training",
) -> LanguageModel:
    """Trains a model by a recipe, and shows the progress of `what`."""
    losses = _train.train(
        model,
        text.train,
        steps=steps,
        batch=recipe.batch,
        window=recipe.window,
        learning_rate=recipe.learning_rate,
        key=jr.key(seed),
    )
    bar.doing(f"compiling the {what}")
    for i, (model, value) in enumerate(losses):
        # Reading the loss waits for the step, so do it rarely.
        if i % 10 == 0:
            bar.doing(f"{what}, {float(value):.2f} nats/byte")
            bar.done(recipe.seconds_per_step * min(10, steps - i))
    return model


def _fingerprint(recipe, text):
    # A hash of everything that the trained model depends on, including the code.
    hash = hashlib.sha256(repr(recipe).encode())
    for module in (_model, _train):
        hash.update(inspect.getsource(module).encode())
    hash.update(text.train)
    return hash.hexdigest()[:16]


def folder() -> pathlib.Path:
    """Returns the folder of this library in the user's cache."""
    home = pathlib.Path.home()
    if sys.platform == "win32":
        root = os.environ.get("LOCALAPPDATA") or home / "AppData" / "Local"
    elif sys.platform == "darwin":
        root = home / "Library" / "Caches"
    else:
        root = os.environ.get("XDG_CACHE_HOME") or home / ".cache"
    return pathlib.Path(root) / "eqquant"


def save(path: pathlib.Path, model: PyTree) -> None:
    """Writes a checksum and the arrays of a model. An interruption leaves no partial
    file."""
    buffer = io.BytesIO()
    eqx.tree_serialise_leaves(buffer, model)
    data = buffer.getvalue()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(f".{os.getpid()}")
    unfinished.write_bytes(hashlib.sha256(data).digest() + data)
    os.replace(unfinished, path)


def load(path: pathlib.Path, like: PyTree) -> PyTree | None:
    """Reads a file of `save`. Returns `None` if it is damaged."""
    content = path.read_bytes()
    checksum, data = content[:32], content[32:]
    if hashlib.sha256(data).digest() != checksum:
        return None
    return eqx.tree_deserialise_leaves(io.BytesIO(data), like)
