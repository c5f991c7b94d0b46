import math
import re
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from ._rows import LlamaRow


def table(
    rows: Sequence[LlamaRow], held_out: int, calibration: int, embedding: str
) -> RenderableType:
    """Returns a table of rows, and the calls that made them. The first row is the dense
    model. `held_out` and `calibration` are the numbers of tokens to evaluate and to
    calibrate with, and `embedding` is the format of the embedding in quantized models.
    """
    table = Table(
        box=SIMPLE_HEAD, show_edge=False, pad_edge=False, collapse_padding=True
    )
    for title in ("format", "method"):
        table.add_column(title, no_wrap=True, vertical="bottom")
    for title in (
        *("bits/\nweight", "MB", "perplex-\nity", "nats per\ntoken", "change"),
        "tokens\nper s",
    ):
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        # (Not "-0.000".)
        rounded = round(row.change_per_token, 3) + 0.0
        change = f"{rounded:+.3f} ± {row.change_error:.3f}"
        speed = row.tokens_per_second
        table.add_row(
            Text(row.format),
            row.method,
            f"{row.bits_per_weight:.2f}",
            f"{row.megabytes:.0f}",
            f"{row.perplexity:.4g}",
            f"{row.nats_per_token:.2f} ± {row.nats_error:.2f}",
            "" if row is rows[0] else change,
            "" if math.isnan(speed) else f"{speed:.0f}",
        )
    calls = "\nnearest   eqq.tree_quantize(model, eqq.NF4())\n"
    if calibration > 0:
        calls += (
            "GPTQ      stats = eqq.calibrate(apply, model, batches)"
            f"  # {calibration:,} tokens\n"
            "          eqq.tree_quantize(model, eqq.Int(3), stats=stats)\n"
        )
    text = _caption.format(held_out=held_out, embedding=embedding)
    return Group(table, Text(calls), Text(text))


_caption = (
    "Nats per token: the loss on {held_out:,} tokens of the second half of Python's "
    "help (pydoc_data), and its standard error. Change: from float32, on the same "
    "tokens. Bits: of the matrices of layers, scales included. MB: of the whole model; "
    "quantized models have the embedding in {embedding}. Speed: for one text, its "
    "prompt included."
)


def continuations(rows: Sequence[LlamaRow], prompt: str) -> RenderableType:
    """Returns a table of the continuations of a text by each model."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        name = f"{row.format} {row.method}".strip()
        text = Text(prompt, "bold")
        text.append(re.sub(r"\s+", " ", row.text), "not bold")
        table.add_row(Text(name), text)
    return Group(Text("\nThe most likely continuation of the bold text:\n"), table)
