import importlib.util
import os
import pathlib

import jax
import jax.numpy as jnp
import jax.random as jr
from rich.console import Console
from rich.live import Live
from rich.panel import Panel

from .._tree import tree_quantize
from ..formats import Binary, Int4, Int8, Nested, NF4, Ternary
from . import _recipe
from ._figure import write_figure
from ._generate import generate
from ._measure import measure
from ._table import Row, table, write_csv
from ._text import standard_library, windows
from ._trained import trained


_formats = {
    "Int8()": Int8(),
    "NF4(64)": NF4(64),
    "Nested(NF4(64), Int8(256))": Nested(NF4(64), scale=Int8(256)),
    "Int4(64, symmetric=False)": Int4(64, symmetric=False),
    "Int4(64)": Int4(64),
    "Ternary()": Ternary(),
    "Binary()": Binary(),
}


def run(
    quick: bool = False,
    fresh: bool = False,
    out: str | os.PathLike | None = "eqquant-demo",
    console: Console | None = None,
) -> list[Row]:
    """Trains a small language model on the source of Python's standard library, and
    shows what each format makes of it: its size, its loss and its speed.

    **Arguments:**

    - `quick`: train for ten seconds, not for a minute and a half.
    - `fresh`: train even if the model is in the user's cache.
    - `out`: the folder to write `table.csv` and, if matplotlib is installed, `loss.png`
        to. `None` to write nothing.
    - `console`: where to print to.

    **Returns:**

    The rows of the table. The first is that of the float32 model.
    """
    console = Console() if console is None else console
    recipe = _recipe.quick if quick else _recipe.full
    text = standard_library()
    dense = trained(recipe, text, fresh=fresh, console=console)
    held_out = windows(text.held_out, 64 if quick else 512, recipe.window + 1)
    rows = _rows(dense, jnp.asarray(held_out), console)
    _continue(dense, console)
    if out is not None:
        _write(pathlib.Path(out), rows, console)
    return rows


def _rows(dense, held_out, console):
    def show():
        predicted = held_out.size - len(held_out)
        return table(rows, predicted, jax.default_backend())

    rows = []
    rows.append(measure("float32", dense, held_out, None))
    with Live(show(), console=console, auto_refresh=False) as live:
        for name, format in _formats.items():
            model = tree_quantize(dense, format)
            rows.append(measure(name, model, held_out, rows[0]))
            live.update(show(), refresh=True)
    return rows


def _continue(dense, console):
    prompt = b"    def __init__(self"
    for name, model in {
        "float32": dense,
        "NF4(64)": tree_quantize(dense, NF4(64)),
    }.items():
        continued = generate(model, prompt, 256, key=jr.key(0))
        console.print(Panel(continued.decode(errors="replace"), title=name))


def _write(folder, rows, console):
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "table.csv"]
    write_csv(written[0], rows)
    if importlib.util.find_spec("matplotlib") is not None:
        written.append(folder / "loss.png")
        write_figure(written[1], rows)
    console.print(f"Wrote {' and '.join(map(str, written))}.")
