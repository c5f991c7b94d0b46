import os

import jax.numpy as jnp
import jax.random as jr
from rich.console import Console
from rich.text import Text

from .._any_encoding import any_encoding
from ..formats import NF4
from ._comparison import Comparison, quantized
from ._figure import write_figure
from ._files import write_csv, write_files
from ._generate import generate
from ._table import Row
from ._text import standard_library, windows
from ._trained import quick as quick_recipe, short


_prompts = (b'    """Return ', b"def ")


@any_encoding()
def run(
    quick: bool = False,
    fresh: bool = False,
    out: str | os.PathLike[str] | None = "eqquant-demo",
    console: Console | None = None,
) -> list[Row]:
    """Trains a small language model on the source of Python's standard library, and
    quantizes it: by rounding to nearest in several formats, with statistics of its
    inputs, and by further training. Prints the size, the loss and the speed of each,
    the calls that made them, and text that two of them generate.

    **Arguments:**

    - `quick`: whether to train for some seconds instead of a minute.
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
    recipe = quick_recipe if quick else short
    text = standard_library()
    held_out = windows(text.held_out, 64 if quick else 256, recipe.window + 1)
    steps = recipe.steps // 5
    comparison = Comparison(recipe, text, jnp.asarray(held_out), steps, console)
    dense = comparison.run(fresh)
    console.print(comparison.table())
    _continue_texts(dense, console)
    if out is not None:
        _write(out, comparison.rows, console)
    return comparison.rows


def _continue_texts(dense, console):
    models = {"float32": dense, "NF4()": quantized(dense, NF4())}
    for i, prompt in enumerate(_prompts):
        for name, model in models.items():
            written = generate(model, prompt, key=jr.key(i)).removeprefix(prompt)
            text = Text(f"\n{name} continues the bold text:\n")
            text.append(prompt.decode(), "bold")
            text.append(written.decode(errors="replace").rstrip())
            console.print(text)


def _write(folder, rows, console):
    files = {
        "table.csv": lambda path: write_csv(path, Row._fields, rows),
        "loss.png": lambda path: write_figure(path, rows),
    }
    write_files(folder, files, console)
