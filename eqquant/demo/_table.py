import csv
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import jax.tree_util as jtu
from jaxtyping import Array, UInt8
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from .._array import is_quantized
from ._model import LanguageModel
from ._train import mean_loss


class Row(NamedTuple):
    """The size, the loss and the speed of a model in one format.

    - `format`: the format, as written in Python.
    - `bits_per_weight`: the bits of each quantized weight, scales included.
    - `megabytes`: the size of the whole model.
    - `nats_per_byte`: the loss on held-out text.
    - `change`: the difference from the loss of the dense model.
    - `bytes_per_second`: the speed of generation with a batch of one.
    """

    format: str
    bits_per_weight: float
    megabytes: float
    nats_per_byte: float
    change: float = 0.0
    bytes_per_second: float = math.nan

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def needs_training(self) -> bool:
        return self.change > 0.1


def table(rows: Sequence[Row], held_out: int, platform: str) -> Table:
    """A table of rows, the first of which is the dense model.

    **Arguments:**

    - `held_out`: the number of bytes of which the loss is the mean.
    - `platform`: the platform on which the model ran.
    """
    caption = (
        f"\nLoss: per byte, of {held_out:,} bytes of held-out modules. Change: from "
        "float32, in nats per byte. MB: of the whole model, whose embedding stays in "
        "float32. Tokens/s: bytes of one text, generated one at a time, on "
        f"{platform}."
    )
    if any(row.needs_training for row in rows):
        caption += (
            "\n* Needs training: so few bits work well only in a model trained with "
            "them (quantization-aware training)."
        )
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
        caption=Text(caption),
        caption_justify="left",
    )
    table.add_column("format", no_wrap=True, vertical="bottom")
    for title in ("bits/\nweight", "MB", "loss,\nbits", "loss,\nnats", "change"):
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    table.add_column("tokens/s", justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        speed = row.bytes_per_second
        table.add_row(
            Text(row.format + (" *" if row.needs_training else "")),
            f"{row.bits_per_weight:.2f}",
            f"{row.megabytes:.2f}",
            f"{row.bits_per_byte:.4f}",
            f"{row.nats_per_byte:.4f}",
            "" if row is rows[0] else f"{row.change:+.4f}",
            "" if math.isnan(speed) else f"{speed:,.0f}",
        )
    return table


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Writes the rows to a CSV file."""
    fields = (*Row._fields, "bits_per_byte", "needs_training")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerows([getattr(row, field) for field in fields] for row in rows)


def measure(name: str, model: LanguageModel, held_out: UInt8[Array, "b t"]) -> Row:
    """The size of a model, and its loss on windows of a text. (Its speed is measured
    later, when nothing else runs.)"""
    return Row(
        format=name,
        bits_per_weight=bits_of(model),
        megabytes=_nbytes(jtu.tree_leaves(model, is_leaf=is_quantized)) / 1e6,
        nats_per_byte=mean_loss(model, held_out, batch=min(64, len(held_out))),
    )


def bits_of(model: LanguageModel) -> float:
    """The bits of each quantized weight of a model, scales included. Those of all
    weights, if none is quantized."""
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    weights = [leaf for leaf in leaves if is_quantized(leaf)] or leaves
    return 8 * _nbytes(weights) / sum(leaf.size for leaf in weights)


def _nbytes(arrays):
    return sum(a.nbytes for a in arrays)
