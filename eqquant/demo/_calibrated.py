import os
import pathlib
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from .._any_encoding import any_encoding
from .._report import Sensitivity, sensitivity
from .._solvers import GPTQ, ScaleSearch
from .._trace import calibrate, Sequential
from .._tree import tree_quantize
from ..formats import Int, Int4, NF4, Ternary
from ._axes import axes_of_bits
from ._bar import Bar
from ._files import write_csv, write_files
from ._table import bits_of
from ._text import standard_library, windows
from ._train import mean_loss
from ._trained import full, quick as quick_recipe, trained


class Change(NamedTuple):
    """The change of the loss when a model is quantized.

    - `format`: the format, as written in Python, or the budget of bits for which
        formats were chosen.
    - `method`: how numbers were rounded, or how the formats were chosen.
    - `bits_per_weight`: the bits of each quantized weight, scales included.
    - `change`: the difference from the loss of the dense model, in nats per byte. The
        median, if there were several sets of data to calibrate with.
    """

    format: str
    method: str
    bits_per_weight: float
    change: float


_formats = (
    Int4(64),
    Int4(64, symmetric=False),
    NF4(64),
    Int(3, 64),
    Int(3, 64, "minimum"),
    Int(2, 64, "minimum"),
    Ternary(64),
)
_methods = ("to nearest", "ScaleSearch()", "GPTQ()", "Sequential")
_choices = ("formats by loss", "formats by Grams")
_budgets = (2.5, 3.0, 3.5, 4.0, 4.5)
_number = 64  # of windows to calibrate with


@any_encoding()
def run_calibrated(
    quick: bool = False,
    fresh: bool = False,
    out: str | os.PathLike[str] | None = "eqquant-demo",
    console: Console | None = None,
    seeds: int = 1,
) -> list[Change]:
    """Quantizes a model to few bits. (The model is larger than in `run`, and trained
    for longer.) Prints how much its loss rises if it is rounded to nearest, by
    `ScaleSearch()`, by `GPTQ()`, by `GPTQ()` with `Sequential` statistics, and by
    `GPTQ()` in formats that were chosen within a budget of bits.

    **Arguments:**

    - `quick`, `fresh`, `out`, `console`: as in `run`. The files are `calibrated.csv`
        and, if matplotlib is installed, `calibrated.png` and `budgets.png`.
    - `seeds`: how many sets of 64 windows of the training text to calibrate with.
        Results are medians over these sets.

    **Returns:**

    A row for each format and method, and for each budget.

    **Raises:**

    The errors of `run`.
    """
    console = Console() if console is None else console
    recipe = quick_recipe if quick else full
    text = standard_library()
    held_out = windows(text.held_out, 64 if quick else 512, recipe.window + 1)
    random = np.random.default_rng(0)
    starts = random.integers(
        0, text.train.size - recipe.window - 1, (seeds, _number, 1)
    )
    sets = text.train[starts + np.arange(recipe.window + 1)]
    bar = Bar(recipe.seconds + _Measured.steps * seeds * 3.0, console)
    with bar.shown():
        dense = trained(recipe, text, fresh=fresh, console=console, bar=bar)
        data = jnp.asarray(held_out), list(map(jnp.asarray, sets))
        measured = _Measured(dense, *data, bar)
        rows = list(measured.rows())
    dense_loss = measured.dense_loss
    console.print(_table(rows, dense_loss, held_out[:, 1:].size, seeds))
    if out is not None:
        _write(out, rows, measured.sensitivity, console)
    return rows


class _Measured:
    """Measures the rows, one after another, and updates a progress bar.

    - `sensitivity`: the sensitivity for the first set, by the loss, once it was
        measured.
    - `steps`: the number of rows.
    """

    steps = len(_formats) * len(_methods) + len(_budgets) * len(_choices)
    sensitivity: Sensitivity

    def __init__(self, dense, held_out, sets, bar):
        self._bar = bar
        self._dense, self._held_out, self._sets = dense, held_out, sets
        self._batches = [list(jnp.split(x, 4)) for x in sets]
        self.dense_loss = mean_loss(dense, held_out, batch=64)

    def rows(self):
        self._bar.doing("calibrating")
        stats = [calibrate(_apply, self._dense, batches) for batches in self._batches]
        sequential = [Sequential(_apply, batches) for batches in self._batches]
        for format in _formats:
            quantize = lambda **how: self._quantized(format, **how)
            models = (
                lambda: [quantize()],
                lambda: [quantize(method=ScaleSearch())],
                lambda: [quantize(stats=each) for each in stats],
                lambda: [quantize(stats=each) for each in sequential],
            )
            for method, make in zip(_methods, models):
                yield self._row(str(format), method, make)
        for choice, found in zip(_choices, self._sensitivities(stats)):
            for bits in _budgets:
                make = lambda: [
                    self._quantized(each.allocate(bits), stats=s)
                    for each, s in zip(found, stats)
                ]
                yield self._row(f"{bits} bits", choice, make)

    def _sensitivities(self, stats):
        self._bar.doing("how sensitive each weight is")
        by_loss = [
            sensitivity(
                self._dense,
                s,
                loss=lambda model: mean_loss(model, x, batch=32),
                method=GPTQ(passes=1),
            )
            for s, x in zip(stats, self._sets)
        ]
        self.sensitivity = by_loss[0]
        yield by_loss
        yield [sensitivity(self._dense, s) for s in stats]

    def _quantized(self, formats, **how):
        return tree_quantize(self._dense, formats, **how)

    def _row(self, format, method, make):
        with self._bar.follow(f"{format}, {method}", 3.0 * len(self._sets)):
            models = make()
            losses = [mean_loss(model, self._held_out, batch=64) for model in models]
        bits = statistics.median(map(bits_of, models))
        change = statistics.median(losses) - self.dense_loss
        return Change(format, method, bits, change)


def _apply(model, windows):
    return jax.vmap(model)(windows[:, :-1])


def _table(rows, dense_loss, held_out, seeds):
    known = {(row.format, row.method): row for row in rows}
    each = "one set" if seeds == 1 else f"medians over {seeds} sets"
    caption = (
        f"\nThe increase of the loss above float32, {dense_loss:.4f} nats per byte on "
        f"{held_out:,} bytes of held-out modules. Calibrated with {_number} windows of "
        f"the training text ({each})."
    )
    methods = _columns("format", [str(format) for format in _formats], _methods, known)
    names = [f"{bits} bits" for bits in _budgets]
    choices = _columns("budget", names, _choices, known)
    return Group(
        methods, Text("\nA format for each weight, by GPTQ()\n"), choices, Text(caption)
    )


def _columns(title, names, methods, known):
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    add = lambda title, **how: table.add_column(
        title, no_wrap=True, vertical="bottom", **how
    )
    add(title)
    for head in ("bits/\nweight", *(_heads.get(method, method) for method in methods)):
        add(head, justify="right")
    for name in names:
        found = [known[name, method] for method in methods]
        changes = [f"{row.change:+.4f}" for row in found]
        bits = max(row.bits_per_weight for row in found)
        table.add_row(Text(name), f"{bits:.2f}", *changes)
    return table


# Broken so that the table fits into eighty columns.
_heads = {
    "to nearest": "to\nnearest",
    "ScaleSearch()": "Scale-\nSearch()",
    "formats by loss": "formats\nby loss",
    "formats by Grams": "formats\nby Grams",
}


def _write(folder, rows, found, console):
    files = {
        "calibrated.csv": lambda path: write_csv(path, Change._fields, rows),
        "calibrated.png": lambda path: write_figure(path, rows),
        "budgets.png": lambda path: found.figure().savefig(path, dpi=150),
    }
    write_files(folder, files, console)


def write_figure(path: pathlib.Path, rows: Sequence[Any]) -> None:
    """Plots the increase of the loss against bits per weight, with a marker for each
    method, and a line for formats that were chosen within a budget."""
    figure, axes = axes_of_bits(8.0, 5.0, "loss above float32, nats per byte")
    axes.set_yscale("log")
    methods = dict.fromkeys(row.method for row in rows)
    labels: dict[float, tuple[float, list[str]]] = {}
    for i, method in enumerate(methods):
        some = [row for row in rows if row.method == method and row.change > 0]
        chosen = method.startswith("formats")
        style = (
            dict(linestyle="-", marker=".") if chosen else dict(marker="os^D"[i % 4])
        )
        some.sort(key=lambda row: row.bits_per_weight)
        x, y = (
            [getattr(r, name) for r in some] for name in ("bits_per_weight", "change")
        )
        axes.plot(x, y, **{"linestyle": "", "color": f"C{i}", "label": method, **style})
        for row in some if not chosen else ():
            bits = round(row.bits_per_weight, 2)
            high, names = labels.get(bits, (row.change, []))
            names = [*dict.fromkeys((*names, row.format))]
            labels[bits] = max(high, row.change), names
    for bits, (change, names) in labels.items():
        axes.annotate(
            ", ".join(names),
            (bits, change),
            xytext=(2, 7),
            textcoords="offset points",
            rotation=40,
            rotation_mode="anchor",
            fontsize=8,
            color="0.4",
        )
    axes.legend(frameon=False)
    axes.margins(x=0.15, y=0.1)
    figure.savefig(path, dpi=150)
