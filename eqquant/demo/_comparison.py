import os
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, UInt8
from rich.console import Console, RenderableType

from .._trace import calibrate
from .._tree import tree_quantize
from ..formats import AbstractFormat, Binary, Int, Int4, Int8, NF4, Ternary
from ..train import tree_fake_quantize, tree_freeze
from ._bar import Bar
from ._model import LanguageModel
from ._speed import larger, time_of_step, tokens_per_second, Unrolled
from ._table import measure, Row, table
from ._text import Text
from ._trained import Recipe, train_further, trained


nearest = (Int8(), NF4(), Int4(), Int(3))
calibrated = (Int(3),)
# Formats with so few bits work well only in a model that is trained with them.
trained_with = (Ternary(), Binary())
# Jitted as a whole, which compiles faster than array by array.
quantized = eqx.filter_jit(tree_quantize)
_unrolled = eqx.filter_jit(lambda model, *format: Unrolled(_in(model, *format)))
# The time of one step of each kind, on two cores.
_seconds = {"to nearest": 1.5, "calibrating": 5.0, "speed": 2.0}


class Comparison:
    """Makes the rows of the table, and shows its progress.

    - `held_out`: windows of the held-out text.
    - `steps`: how many steps to train further with few bits.
    """

    rows: list[Row]

    def __init__(
        self,
        recipe: Recipe,
        text: Text,
        held_out: UInt8[Array, "b t"],
        steps: int,
        console: Console,
    ):
        self._recipe, self._text, self._held_out = recipe, text, held_out
        self._steps, self._console = steps, console
        self.rows = []
        aware = recipe.seconds_to_compile + steps * recipe.seconds_per_step
        speeds = 1 + len(nearest) + len(trained_with)
        self._bar = Bar(
            recipe.seconds
            + len(nearest) * _seconds["to nearest"]
            + (1 + len(calibrated)) * _seconds["calibrating"]
            + len(trained_with) * aware
            + speeds * _seconds["speed"],
            console,
        )

    def run(self, fresh: bool) -> LanguageModel:
        """Makes all rows, and returns the model in float32."""
        with self._bar.shown(lambda: self.table() if self.rows else None):
            dense = trained(
                self._recipe,
                self._text,
                fresh=fresh,
                console=self._console,
                bar=self._bar,
            )
            self._add(measure("float32", "", dense, self._held_out))
            self._add_nearest(dense)
            self._add_calibrated(dense)
            self._add_trained(dense)
            self._add_speeds()
        return dense

    def table(self) -> RenderableType:
        number = self._held_out[:, 1:].size
        return table(self.rows, number, self._steps, jax.default_backend())

    def _add(self, row):
        first = self.rows[0] if self.rows else row
        change = row.nats_per_byte - first.nats_per_byte
        self.rows.append(row._replace(change=change))
        # Formats in the order of their bits, each with all of its methods.
        self.rows.sort(key=lambda row: -row.bits_per_weight)

    def _add_nearest(self, dense):
        def make(format):
            model = quantized(dense, format)
            return measure(str(format), "nearest", model, self._held_out)

        self._bar.doing("rounding to nearest")
        # Most of the time is compiling, which uses one core per model.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for row in pool.map(make, nearest):
                self._add(row)
                self._bar.done(_seconds["to nearest"])

    def _add_calibrated(self, dense):
        size, random = self._recipe.window, np.random.default_rng(0)
        starts = random.integers(0, self._text.train.size - size, (4, 16, 1))
        batches = self._text.train[starts + np.arange(size)]
        apply = lambda model, batch: jax.vmap(model)(batch)
        with self._bar.follow("calibrating", _seconds["calibrating"]):
            stats = calibrate(apply, dense, list(map(jnp.asarray, batches)))
        for format in calibrated:
            what = f"{format} by GPTQ"
            with self._bar.follow(what, _seconds["calibrating"]):
                model = tree_quantize(dense, format, stats=stats)
            self._add(measure(str(format), "GPTQ", model, self._held_out))

    def _add_trained(self, dense):
        for format in trained_with:
            model = train_further(
                tree_fake_quantize(dense, format),
                self._recipe,
                self._text,
                self._steps,
                self._bar,
                seed=self._recipe.seed + 2,
                what=f"training for {format}",
            )
            packed = tree_freeze(model)
            self._add(measure(str(format), "trained", packed, self._held_out))
            self._bar.done(self._recipe.seconds_to_compile)

    def _add_speeds(self):
        self._bar.doing("compiling a larger model")
        model, formats = eqx.filter_jit(larger)(), (*nearest, *trained_with)

        def make(*format):
            model_ = _unrolled(model, *format)
            time_of_step(model_)
            return model_

        models = [make()]
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for format, new in zip(formats, pool.map(make, formats)):
                models.append(new)
                self._bar.doing(f"compiled a larger model in {format}")
                self._bar.done(_seconds["speed"])
        self._bar.doing("timing a larger model")
        speeds = dict(zip(("float32", *map(str, formats)), tokens_per_second(models)))
        for i, row in enumerate(self.rows):
            self.rows[i] = row._replace(tokens_per_second=speeds[row.format])
        self._bar.done(_seconds["speed"])


def _in(model, format: AbstractFormat | None = None):
    return model if format is None else tree_quantize(model, format)
