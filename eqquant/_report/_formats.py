import csv
import dataclasses
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._array import quantize, sqnr
from ..formats import AbstractFormat, as_format
from ._text import plain


_size = 4096

_names = (
    *("int8", "int8(128)", "nf4", "nested", "int4", "int4(symmetric=False)"),
    *("rotated(int8)", "rotated(int4)"),
    *("ternary", "ternary(128, rule='threshold')", "ternary(scale='tensor')"),
    *("binary", "binary(128)"),
)
_formats = tuple(map(as_format, _names))


@dataclasses.dataclass(frozen=True)
class FormatRow:
    """The size and the accuracy of a format.

    - `format`: the format, as it is written.
    - `bits_per_weight`: for a 4096x4096 matrix of float32, scales included.
    - `normal`, `student_t`: the signal-to-quantization-noise ratio, in decibels, for
        256 rows of 4096 samples of a normal distribution, and of a Student's t
        distribution with five degrees of freedom.
    - `loss`: the increase in the loss of the demo's model, in nats per byte. `None` if
        it is not known.
    """

    format: str
    bits_per_weight: float
    normal: float
    student_t: float
    loss: float | None


@dataclasses.dataclass(frozen=True, repr=False)
class FormatTable:
    """The formats of this library side by side. It prints as a table; `rows` is its
    data."""

    rows: list[FormatRow]

    def markdown(self) -> str:
        """The table in Markdown."""
        header, *lines = self._cells()
        header = [title.replace("\n", " ") for title in header]
        lines = [[f"`{name}`", *cells] for name, *cells in lines]
        first, *others = [max(map(len, column)) for column in zip(header, *lines)]
        rule = ["-" * first, *("-" * (width - 1) + ":" for width in others)]

        def write(line):
            name, *cells = line
            cells = [cell.rjust(width) for cell, width in zip(cells, others)]
            return f"| {' | '.join([name.ljust(first), *cells])} |"

        return "\n".join(map(write, [header, rule, *lines]))

    def __repr__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        caption = (
            f"Bits per weight: for a {_size} x {_size} matrix of float32, scales "
            "included. SQNR: the signal-to-quantization-noise ratio for a million "
            "samples of a normal distribution, and of a Student's t distribution with "
            f"five degrees of freedom, in rows of {_size}."
        )
        if self._has_losses:
            caption += " Change of loss: of the demo's language model, per byte."
        table = Table(
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            caption=Text(f"\n{caption}"),
            caption_justify="left",
        )
        (name, *titles), *lines = self._cells()
        table.add_column(Text(name), no_wrap=True, vertical="bottom")
        for title in titles:
            table.add_column(Text(title, justify="right"), justify="right")
        for line in lines:
            table.add_row(*map(Text, line))
        yield table

    @property
    def _has_losses(self) -> bool:
        return any(row.loss is not None for row in self.rows)

    def _cells(self) -> list[list[str]]:
        lines = [
            ["format", "bits per\nweight", "SQNR,\nnormal", "SQNR,\nStudent's t"],
            *(
                [
                    row.format,
                    f"{row.bits_per_weight:.2f}",
                    f"{row.normal:.1f} dB",
                    f"{row.student_t:.1f} dB",
                ]
                for row in self.rows
            ),
        ]
        if not self._has_losses:
            return lines
        losses = [_signed(row.loss) for row in self.rows]
        losses = ["change of\nloss, nats", *losses]
        return [[*line, loss] for line, loss in zip(lines, losses)]


def _signed(x: float | None) -> str:
    return "" if x is None else f"{x:+.4f}"


def format_table(losses: str | os.PathLike[str] | None = None) -> FormatTable:
    """Compares the formats of eqquant. Returns a `FormatTable`, which prints as a
    table. Its `rows` hold the same as data. Raises a `ValueError` if `losses` is not
    such a file. `losses` is the CSV file that the demo writes, for a column of losses.
    """
    shape = (256, _size)
    normal = np.random.default_rng(0).standard_normal(shape, np.float32)
    student_t = np.random.default_rng(1).standard_t(5, shape).astype(np.float32)
    found = {} if losses is None else read_losses(losses)
    rows = []
    for format in _formats:
        row = FormatRow(
            format=str(format),
            bits_per_weight=_bits_per_weight(format),
            normal=_sqnr(normal, format),
            student_t=_sqnr(student_t, format),
            loss=found.get(str(format)),
        )
        rows.append(row)
    return FormatTable(rows)


def _bits_per_weight(format: AbstractFormat) -> float:
    w = jax.ShapeDtypeStruct((_size, _size), jnp.float32)
    q = jax.eval_shape(lambda w: quantize(w, format, axis=-1), w)
    return q.bits_per_weight


def _sqnr(w: np.ndarray, format: AbstractFormat) -> float:
    return sqnr(w, quantize(w, format, axis=-1).dequantize())


def read_losses(path: str | os.PathLike[str]) -> dict[str, float]:
    """Reads the change of the loss by format from the CSV file that the demo writes.
    Raises a `ValueError` if it is not such a file."""
    with open(path, newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file, restval="")
        columns = reader.fieldnames or ()
        if not {"format", "change"} <= set(columns):
            raise ValueError(
                "it should be the CSV file that the demo writes, with columns `format` "
                f"and `change`. Got columns {', '.join(columns)}"
            )
        found = [(row["format"], float(row["change"])) for row in reader]
    # If a format has several rows, the first is for rounding to nearest.
    return {_spelled(name): change for name, change in reversed(found)}


def _spelled(name: str) -> str:
    # The first row is for the dense model.
    return name if name == "float32" else str(as_format(name))
