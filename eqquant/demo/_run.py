import importlib.util
import os
import pathlib
from concurrent.futures import ThreadPoolExecutor

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.random as jr
from rich.console import Console
from rich.live import Live
from rich.text import Text

from .._tree import tree_quantize
from ..formats import Binary, Int4, Int8, Nested, NF4, Ternary
from ._figure import write_figure
from ._generate import bytes_per_second, generate
from ._table import measure, Row, table, write_csv
from ._text import standard_library, windows
from ._trained import full, quick as quick_recipe, trained


_formats = (
    None,
    Int8(),
    NF4(),
    Nested(),
    Int4(),
    Int4(symmetric=False),
    Ternary(),
    Binary(),
)
_prompts = (b'    """Return ', b"def ")
# Jitted as a whole, which compiles faster than array by array.
_quantize = eqx.filter_jit(tree_quantize)


def run(
    quick: bool = False,
    fresh: bool = False,
    out: str | os.PathLike[str] | None = "eqquant-demo",
    console: Console | None = None,
) -> list[Row]:
    """Trains a small language model on the source of Python's standard library,
    quantizes it in several formats, and prints the size, the loss and the speed in each
    of them, and generated text.

    **Arguments:**

    - `quick`: whether to train for ten seconds instead of a minute and a half.
    - `fresh`: whether to train even if the model is in the user's cache.
    - `out`: the folder for `table.csv` and, if matplotlib is installed, `loss.png`.
        `None` to write neither.
    - `console`: the console to print to.

    **Returns:**

    The rows of the table. The first is the model in float32.

    **Raises:**

    A `FileNotFoundError` if this Python has no source of its standard library.
    """
    console = Console() if console is None else console
    recipe = quick_recipe if quick else full
    text = standard_library()
    dense = trained(recipe, text, fresh=fresh, console=console)
    held_out = windows(text.held_out, 64 if quick else 512, recipe.window + 1)
    rows = _compare(dense, jnp.asarray(held_out), console)
    _continue_texts(dense, console)
    if out is not None:
        _write(pathlib.Path(out), rows, console)
    return rows


def _compare(dense, held_out, console):
    def prepare(format):
        name = "float32" if format is None else str(format)
        model = dense if format is None else _quantize(dense, format)
        row = measure(name, model, held_out)
        generate(model, _prompts[0], key=jr.key(0))  # to compile it
        return model, row

    def so_far():
        return table(rows, held_out[:, 1:].size, jax.default_backend())

    models, rows = [], []
    with Live(console=console, auto_refresh=False, transient=True) as live:
        # Most of the time is compiling, which uses one core per model.
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for model, row in pool.map(prepare, _formats):
                models.append(model)
                first = rows[0] if rows else row
                change = row.nats_per_byte - first.nats_per_byte
                rows.append(row._replace(change=change))
                live.update(so_far(), refresh=True)
        for i, model in enumerate(models):
            rows[i] = rows[i]._replace(bytes_per_second=bytes_per_second(model))
            live.update(so_far(), refresh=True)
    console.print(so_far())
    return rows


def _continue_texts(dense, console):
    models = {"float32": dense, "NF4()": _quantize(dense, NF4())}
    for i, prompt in enumerate(_prompts):
        for name, model in models.items():
            written = generate(model, prompt, key=jr.key(i)).removeprefix(prompt)
            text = Text(f"\n{name} continues the bold text:\n")
            text.append(prompt.decode(), "bold")
            text.append(written.decode(errors="replace").rstrip())
            console.print(text)


def _write(folder, rows, console):
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "table.csv"]
    write_csv(folder / "table.csv", rows)
    if importlib.util.find_spec("matplotlib") is not None:
        written.append(folder / "loss.png")
        write_figure(folder / "loss.png", rows)
    console.print(Text(f"\nWrote {' and '.join(map(str, written))}."), soft_wrap=True)
