import csv
import math
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import rich.table


class Row(NamedTuple):
    """What a model costs and what it is worth, in one format."""

    format: str
    bits_per_weight: float
    megabytes: float
    nats_per_byte: float
    change: float
    bytes_per_second: float

    @property
    def bits_per_byte(self) -> float:
        return self.nats_per_byte / math.log(2)

    @property
    def needs_training(self) -> bool:
        return self.change > 0.1


def table(rows: Sequence[Row], held_out: int, platform: str) -> rich.table.Table:
    caption = (
        f"Loss is over {held_out:,} bytes of modules that were held out, the same for "
        "every format. MB is the whole model, with its embedding in float32. Bytes/s is "
        f"generation, one byte at a time, with a batch of one, on {platform}."
    )
    if any(row.needs_training for row in rows):
        caption += (
            " * needs training: of so few bits, a model makes good use only if it is "
            "trained with them (quantization-aware training, `eqquant.train`)."
        )
    out = rich.table.Table(caption=caption, caption_justify="left")
    out.add_column("format", no_wrap=True)
    out.add_column("bits/\nweight", justify="right")
    out.add_column("\nMB", justify="right")
    out.add_column("loss,\nbits/byte", justify="right")
    out.add_column("loss,\nnats/byte", justify="right")
    out.add_column("\nchange", justify="right")
    out.add_column("\nbytes/s", justify="right")
    for row in rows:
        out.add_row(
            row.format + (" *" if row.needs_training else ""),
            f"{row.bits_per_weight:.3g}",
            f"{row.megabytes:.2f}",
            f"{row.bits_per_byte:.4f}",
            f"{row.nats_per_byte:.4f}",
            f"{row.change:+.4f}" if row is not rows[0] else "",
            f"{row.bytes_per_second:,.0f}",
        )
    return out


def write_csv(path: pathlib.Path, rows: Sequence[Row]) -> None:
    fields = (*Row._fields, "bits_per_byte", "needs_training")
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(fields)
        writer.writerows([getattr(row, field) for field in fields] for row in rows)
