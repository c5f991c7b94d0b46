import collections
import itertools
import os
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import Int as Integer
from rich.console import Console, RenderableType

from ..._array import is_quantized
from ..._trace import calibrate
from ..._tree import tree_dequantize, tree_quantize
from ...formats import Int, Int4, Int8, NF4
from .._bar import Bar
from ._generate import generate
from ._model import Llama
from ._rows import bits_of, LlamaRow, losses, mean_and_error, megabytes_of, size_of
from ._table import table


nearest = (Int8(), NF4(), Int4(), Int(3))
calibrated = Int(3)
_batch = 2  # windows at once
_continued = 32  # tokens
# The time of one step of each kind, on two cores: to compile it, and to run it with 135
# million parameters.
_seconds = {
    "row": (4.0, 5.0),
    "calibrating": (4.0, 16.0),
    "GPTQ": (14.0, 43.0),
    "speed": (0.0, 12.0),
}


class LlamaComparison:
    """Makes the rows of the table, and shows its progress.

    - `model`: the model, as in its file.
    - `tokenizer`: the tokenizer of the model.
    - `held_out`: windows of the held-out text.
    - `calibration`: windows of the text to calibrate with. `None` for no calibrated
        row.
    - `prompt`: the text to continue.
    """

    rows: list[LlamaRow]

    def __init__(
        self,
        model: Llama,
        tokenizer: Any,
        held_out: Integer[np.ndarray, "b t"],
        calibration: Integer[np.ndarray, "c t"] | None,
        prompt: str,
        console: Console,
    ):
        self._file_model, self._tokenizer = model, tokenizer
        self._file_format = _format_of(model)
        self._held_out, self._calibration = held_out, calibration
        self._prompt = jnp.asarray(tokenizer.encode(prompt).ids, jnp.int32)
        self.rows, self._models = [], []
        scale = size_of(model) / 135e6
        self._seconds = {what: a + b * scale for what, (a, b) in _seconds.items()}
        rows = 1 + (self._file_format is not None) + len(nearest)
        todo = ["row"] * rows + ["speed"]
        if calibration is not None:
            todo += ["calibrating", "GPTQ", "row"]
        self._bar = Bar(sum(self._seconds[what] for what in todo), console)

    def run(self) -> None:
        """Makes all rows."""
        with self._bar.shown(lambda: self.table() if self.rows else None):
            self._bar.doing("float32")
            dense = tree_dequantize(self._file_model).stacked()
            self._dense_losses = losses(dense, self._held_out, _batch)
            self._add(self._row("float32", "", dense), dense)
            self._done("row")
            # The embedding stays as it is in the file.
            where = lambda model: model.embed_tokens
            base = eqx.tree_at(where, dense, where(self._file_model))
            self._add_nearest(base)
            if self._calibration is not None:
                self._add_calibrated(base, self._calibration)
            self._add_speeds()

    def table(self) -> RenderableType:
        """The table of all rows so far."""
        number = 0 if self._calibration is None else self._calibration.size
        embedding: Any = self._file_model.embed_tokens.weight
        kept = str(embedding.format) if is_quantized(embedding) else "float32"
        return table(self.rows, self._held_out[:, 1:].size, number, kept)

    def _done(self, what):
        self._bar.done(self._seconds[what])

    def _add(self, row, model):
        self.rows.append(row)
        self._models.append(model)

    def _row(self, format, method, model):
        each = losses(model, self._held_out, _batch)
        return LlamaRow(
            format,
            method,
            bits_of(model),
            megabytes_of(model),
            *mean_and_error(each),
            *mean_and_error(each - self._dense_losses),
            text=self._continue(model),
        )

    def _continue(self, model):
        tokens = np.asarray(generate(model, self._prompt, _continued)).tolist()
        added = self._tokenizer.get_added_tokens_decoder()
        ends = {number for number, token in added.items() if token.special}
        whole = itertools.takewhile(lambda token: token not in ends, tokens)
        return self._tokenizer.decode(list(whole))

    def _add_nearest(self, base):
        named = {str(format): format for format in nearest}

        def make(name, method):
            model = self._file_model
            if method == "nearest":
                model = tree_quantize(base, named[name])
            return self._row(name, method, model), model

        wanted = [(name, "nearest") for name in named]
        if self._file_format is not None:
            wanted.insert(0, (self._file_format, "the file"))
        self._bar.doing("rounding to nearest numbers")
        # Half of the time is compiling, which uses one core per model.
        with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:
            for row, model in pool.map(make, *zip(*wanted)):
                self._add(row, model)
                self._done("row")

    def _add_calibrated(self, base, windows):
        apply = lambda model, windows: jax.vmap(model)(windows)
        batches = windows.reshape(-1, _batch, windows.shape[-1])
        with self._bar.follow("calibrating", self._seconds["calibrating"]):
            stats = calibrate(apply, base, list(map(jnp.asarray, batches)))
        what = f"{calibrated} by GPTQ"
        with self._bar.follow(what, self._seconds["GPTQ"]):
            model = tree_quantize(base, calibrated, stats=stats)
        self._bar.doing(f"measuring {calibrated} by GPTQ")
        self._add(self._row(str(calibrated), "GPTQ", model), model)
        self._done("row")

    def _add_speeds(self):
        self._bar.doing("timing")
        best = [float("inf")] * len(self.rows)
        # The models take turns, so that other load on the machine slows down all of
        # them alike.
        for _ in range(3):
            for i, model in enumerate(self._models):
                start = time.perf_counter()
                jax.block_until_ready(generate(model, self._prompt, _continued))
                best[i] = min(best[i], time.perf_counter() - start)
        # (Both rows of a format run the same program.)
        fastest = {}
        for row, seconds in zip(self.rows, best):
            fastest[row.format] = min(seconds, fastest.get(row.format, seconds))
        for i, row in enumerate(self.rows):
            speed = _continued / fastest[row.format]
            self.rows[i] = row._replace(tokens_per_second=speed)
        self._done("speed")


def _format_of(model: Llama) -> str | None:
    """Returns the format of most weights of the layers, or `None` if they are not
    quantized."""
    sizes = collections.Counter()
    for leaf in jtu.tree_leaves(model.layers, is_leaf=is_quantized):
        sizes[str(leaf.format) if is_quantized(leaf) else None] += leaf.size
    return max(sizes, key=sizes.__getitem__)
