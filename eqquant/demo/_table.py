import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.tree_util as jtu
from jaxtyping import Array, UInt8
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .._array import is_quantized
from ._model import LanguageModel
from ._train import mean_loss


class Row(NamedTuple):
    """The size, the loss and the speed of a model in one format.

    - `format`: the format, as written in Python.
    - `method`: `"nearest"`, `"GPTQ"` or `"trained"`. Empty for the dense model.
    - `bits_per_weight`: the bits of each quantized weight, scales included.
    - `megabytes`: the size of the whole model.
    - `nats_per_byte`: the loss on held-out text.
    - `change`: the difference from the loss of the dense model.
    - `tokens_per_second`: the speed at which a larger model in this format generates
        one text.
    """

    format: str
    method: str
    bits_per_weight: float
    megabytes: float
    nats_per_byte: float
    change: float = 0.0
    tokens_per_second: float = math.nan


def table(
    rows: Sequence[Row], held_out: int, steps: int, platform: str
) -> RenderableType:
    """Returns a table of rows, and the calls that made them. The first row is the dense
    model. The loss is averaged over `held_out` bytes, and there were `steps` steps of
    further training."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for title in ("format", "method"):
        table.add_column(title, no_wrap=True, vertical="bottom")
    for title in (
        *("bits/\nweight", "MB", "loss,\nnats", "change", "tokens/s\n(26M)", "speed"),
    ):
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    dense = rows[0].tokens_per_second
    for row in rows:
        speed = row.tokens_per_second
        known = not math.isnan(speed)
        table.add_row(
            Text(row.format),
            row.method,
            f"{row.bits_per_weight:.2f}",
            f"{row.megabytes:.2f}",
            f"{row.nats_per_byte:.4f}",
            "" if row is rows[0] else f"{row.change:+.4f}",
            f"{speed:,.0f}" if known else "",
            f"{speed / dense:.1f}x" if known else "",
        )
    text = _caption.format(held_out=held_out, steps=steps, platform=platform)
    return Group(table, Text(text))


_caption = """
nearest   eqq.tree_quantize(model, eqq.NF4())
GPTQ      stats = eqq.calibrate(apply, model, batches)
          eqq.tree_quantize(model, eqq.Int(3), stats=stats)
trained   model = eqq.train.tree_fake_quantize(model, eqq.Ternary())
          ... and {steps} more steps of the same training, and then ...
          eqq.train.tree_freeze(model)

Loss: per byte, on {held_out:,} bytes of held-out modules. Change: from float32.
MB: of the whole model, whose embedding stays in float32. Speed: of an untrained
model of the same kind with 26 million parameters that generates one text, on
{platform}. (The trained one is so small that call overhead dominates.)"""


def measure(
    name: str, method: str, model: LanguageModel, held_out: UInt8[Array, "b t"]
) -> Row:
    """Returns a row with the size of a model, and its loss on windows of a text. (The
    speed is measured later, when nothing else runs.)"""
    return Row(
        format=name,
        method=method,
        bits_per_weight=bits_of(model),
        megabytes=_nbytes(jtu.tree_leaves(model, is_leaf=is_quantized)) / 1e6,
        nats_per_byte=mean_loss(model, held_out, batch=min(64, len(held_out))),
    )


def bits_of(model: LanguageModel) -> float:
    """Returns the bits per quantized weight of a model, scales included; or per weight,
    if none is quantized."""
    leaves = jtu.tree_leaves(model, is_leaf=is_quantized)
    weights = [leaf for leaf in leaves if is_quantized(leaf)] or leaves
    return 8 * _nbytes(weights) / sum(leaf.size for leaf in weights)


def _nbytes(arrays):
    return sum(a.nbytes for a in arrays)
