import itertools
import math
from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ._clock import Times
from ._decode import Decoding
from ._measurement import Measurement


caption = (
    "Ratio: speed relative to float32, by the medians of the times; p10, by their "
    "tenth percentiles. Spread: of the times, from the tenth to the ninetieth "
    "percentile. Mem.: the rate at which the weight is read, as a share of the rate at "
    "which this machine reads memory, in the same rounds. Bits: per weight, scales "
    "included. Temp.: memory that the compiled product allocates while it runs. Error: "
    "the largest error, against the product with the decoded weight, relative to "
    "|x| @ |w|, for normally distributed x; outlier, for x with one number in each row "
    "set to 300. Compile: in seconds. XLA: with the kernel that is chosen without the "
    "native library. Prepacked: with the weight in the order of eqquant.tree_prepack."
)
decoding_caption = (
    "One decoding step of a transformer of Llama's architecture with random weights, "
    "which attends to 128 positions. MB: of the whole model, whose embedding stays in "
    "float32. Error: the largest error of the logits, relative to the largest logit, "
    "against the same model with its weights decoded."
)
_times = ("ratio", "p10", "ms,\nspread")


def tables(rows: Sequence[Measurement]) -> list[Table]:
    """Returns a table for each shape and number of rows."""
    made = []
    for (shape, m), group in itertools.groupby(rows, lambda r: (r.shape, r.rows)):
        k, n = shape
        group = list(group)
        read = not math.isnan(group[0].memory)
        rate = f"; memory: {group[0].memory / 1e9:.1f} GB/s" if read else ""
        table = plain_table(
            f"x[{m}, {k}] @ w[{k}, {n}]{rate}",
            ("format,\n  kernel", *_times, *(["% of\nmem."] if read else []))
            + ("bits", "temp.\nMB", "error,\noutlier", "com-\npile"),
        )
        for row in group:
            name = Text(row.name)
            if row.kernel is not None:
                name.append(f"\n  {row.kernel}", "dim")
            if row.failure is not None:
                name.append(f"\n  {row.failure}", "red")
            table.add_row(
                name,
                *_cells(row.times),
                *([number(100 * row.bandwidth, ".0f")] if read else []),
                number(row.bits_per_weight, ".2f"),
                megabytes(row.temporary_bytes),
                _errors(row),
                number(row.compile_seconds, ".1f"),
            )
        made.append(table)
    return made


def decoding_table(rows: Sequence[Decoding]) -> Table:
    """Returns the table of the decoding speeds of a model."""
    table = plain_table(
        f"Decoding, {rows[0].parameters / 1e6:.0f} million parameters",
        ("format", *_times, "tokens\nper s", "bits", "MB", "temp.\nMB", "error")
        + ("com-\npile",),
    )
    for row in rows:
        table.add_row(
            Text(row.name),
            *_cells(row.times),
            number(row.tokens_per_second, ".1f"),
            number(row.bits_per_weight, ".2f"),
            f"{row.nbytes / 1e6:.0f}",
            megabytes(row.temporary_bytes),
            number(row.error, ".0e"),
            number(row.compile_seconds, ".1f"),
        )
    return table


def plain_table(title: str, columns: Sequence[str]) -> Table:
    table = Table(
        title=Text(title),
        title_justify="left",
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        collapse_padding=True,
    )
    # Headings have two lines, like the rows.
    name, *numbers = [c if "\n" in c else f"\n{c}" for c in columns]
    table.add_column(name, min_width=16, max_width=40)
    for column in numbers:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cells(times: Times) -> list[Text | str]:
    if not times.seconds:
        return ["", "", ""]
    spread = f"\n{_rounded(1e3 * times.p10)}–{_rounded(1e3 * times.p90)}"
    return [
        f"{times.ratio:.2f}",
        f"{times.ratio_p10:.2f}",
        Text(_rounded(1e3 * times.median)).append(spread, "dim"),
    ]


def _errors(row: Measurement) -> Text:
    outlier = f"\n{number(row.outlier_error, '.0e')}"
    return Text(number(row.error, ".0e")).append(outlier, "dim")


def number(x: float | None, spec: str) -> str:
    return "" if x is None or math.isnan(x) else f"{x:{spec}}"


def megabytes(nbytes: int | None) -> str:
    return "" if nbytes is None else _rounded(nbytes / 1e6)


def _rounded(x: float) -> str:
    digits = 3 if x < 0.1 else 2 if x < 10 else 1 if x < 100 else 0
    return f"{x:.{digits}f}"
