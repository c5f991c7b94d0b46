import os
import pathlib

from rich.console import Console
from rich.text import Text

from ..._any_encoding import any_encoding
from ...interop import open, tokenizer
from .._files import write_csv, write_files
from .._text import windows
from ._comparison import LlamaComparison
from ._figure import write_figure
from ._open import load_llama
from ._rows import LlamaRow, size_of
from ._table import continuations
from ._text import python_topics


_window = 256


@any_encoding()
def run_llama(
    path: str | os.PathLike[str],
    *,
    prompt: str = "The sky is blue because",
    quick: bool = False,
    out: str | os.PathLike[str] | None = "eqquant-demo",
    console: Console | None = None,
) -> list[LlamaRow]:
    """Opens a language model, quantizes it to several formats, and prints for each the
    size, the loss on a text that every Python has, the speed of generation, and the
    continuation of a prompt.

    **Arguments:**

    - `path`: a GGUF file or a Hugging Face folder of a Llama, Mistral, Qwen 2 or Qwen 3
        model.
    - `prompt`: the text to continue.
    - `quick`: whether to measure with a quarter of the text, and not to calibrate.
    - `out`: the folder for `llama.csv` and, if matplotlib is installed, `llama.png`.
        `None` to write neither.
    - `console`: the console to print to.

    **Returns:**

    The rows of the table. The first is the model in float32.

    **Raises:**

    An `ImportError` if the package `tokenizers` is missing. A `ValueError` if the file
    is damaged, has an unsupported architecture, or has no tokenizer. An `OSError` if it
    cannot be read.
    """
    console = Console() if console is None else console
    with open(path) as checkpoint:
        tokens = tokenizer(checkpoint)
        model = load_llama(checkpoint)
    name, size = pathlib.Path(path).name, size_of(model) / 1e6
    depth = f"{model.config.depth} layers"
    title = f"{name}: {size:.0f} million parameters, {depth}.\n"
    console.print(Text(title), soft_wrap=True)
    text = python_topics(tokens)
    held_out = windows(text.held_out, 2 if quick else 8, _window)
    calibration = None if quick else windows(text.calibration, 16, _window)
    comparison = LlamaComparison(model, tokens, held_out, calibration, prompt, console)
    comparison.run()
    console.print(comparison.table())
    console.print(continuations(comparison.rows, prompt))
    if out is not None:
        _write(out, comparison.rows, console)
    return comparison.rows


def _write(folder, rows, console):
    names = (*LlamaRow._fields, "perplexity")
    lines = [(*row, row.perplexity) for row in rows]
    files = {
        "llama.csv": lambda path: write_csv(path, names, lines),
        "llama.png": lambda path: write_figure(path, rows),
    }
    write_files(folder, files, console)
