import csv
import importlib.util
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.text import Text

from .._any_encoding import any_encoding
from ..formats import AbstractFormat
from ._clock import Times
from ._decode import Decoding, measure_decoding
from ._entries import progress_bar
from ._figure import write_figure
from ._formats import Quantization
from ._machine import describe_machine, has_slow_lookups
from ._measure import measure
from ._measurement import Measurement
from ._peers import missing_packages
from ._table import caption, decoding_caption, decoding_table, tables


@any_encoding()
def run(
    shapes: Sequence[tuple[int, int]] | None = None,
    rows: Sequence[int] = (1, 128),
    formats: Sequence[Quantization | AbstractFormat | str] | None = None,
    *,
    peers: bool = False,
    decode: bool = True,
    quick: bool = False,
    out: str | os.PathLike[str] | None = "eqquant-bench",
    console: Console | None = None,
) -> tuple[list[Measurement], list[Decoding]]:
    """Measures products with quantized weights, and decoding steps of a transformer, on
    this machine, and prints their speeds and errors. Products whose kernel is in the
    native library are also measured without it. Weights that `tree_prepack` reorders
    for this machine are also measured prepacked.

    **Arguments:**

    - `shapes`, `rows`, `formats`, `peers`: as in [`eqquant.bench.measure`][]. By
        default there is one shape, 4096x11008.
    - `decode`: whether to measure decoding, too.
    - `quick`: whether to take half a minute only: fewer rounds, 1024x4096 by default,
        and no decoding.
    - `out`: the folder for `products.csv`, `decoding.csv` and, if matplotlib is
        installed, `products.png`. `None` to write no files.
    - `console`: the console to print to.

    **Returns:**

    The `Measurement`s and the `Decoding`s. The list of `Decoding`s may be empty.
    """
    console = Console() if console is None else console
    write = lambda text: console.print(Text(text), soft_wrap=True)
    if shapes is None:
        shapes = [(1024, 4096) if quick else (4096, 11008)]
    write(f"{describe_machine()}.")
    if peers and missing_packages():
        write(f"Not installed, so not measured: {', '.join(missing_packages())}.")
    write("")
    with progress_bar(console) as show:
        products = measure(
            shapes,
            rows,
            formats,
            peers=peers,
            budget=1 if quick else 6,
            min_rounds=5 if quick else 9,
            show=show,
        )
    for table in tables(products):
        console.print(table)
        write("")
    console.print(Text(caption))
    decodings = []
    if decode and not quick:
        with progress_bar(console) as show:
            decodings = measure_decoding(show=show)
        write("")
        console.print(decoding_table(decodings))
        console.print(Text(f"\n{decoding_caption}"))
    if has_slow_lookups():
        text = (
            "\nJAX 0.11 and newer are 1.4 to 3 times as fast at products that look "
            "codes up in a table."
        )
        console.print(Text(text))
    if out is not None:
        written = _write(pathlib.Path(out), products, decodings)
        write(f"\nWrote {', '.join(map(str, written))}.")
    return products, decodings


def _write(folder, products, decodings):
    folder.mkdir(parents=True, exist_ok=True)
    tables = {"products.csv": [_measurement(row) for row in products]}
    if decodings:
        tables["decoding.csv"] = [_decoding(row) for row in decodings]
    for name, rows in tables.items():
        with (folder / name).open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
    written = [folder / name for name in tables]
    if importlib.util.find_spec("matplotlib") is not None:
        written.append(folder / "products.png")
        write_figure(folder / "products.png", products)
    return written


def _measurement(row: Measurement) -> dict[str, Any]:
    k, n = row.shape
    first = dict(format=row.name, rows=row.rows, shape=f"{k}x{n}", kernel=row.kernel)
    rate = dict(bandwidth=row.bandwidth, memory_bytes_per_second=row.memory)
    rest = ("bits_per_weight", "temporary_bytes", "error", "outlier_error")
    rest = (*rest, "compile_seconds", "failure")
    return {**first, **_times(row.times), **rate, **_fields(row, rest)}


def _decoding(row: Decoding) -> dict[str, Any]:
    first = dict(format=row.name, parameters=row.parameters)
    rest = ("tokens_per_second", "bits_per_weight", "nbytes", "temporary_bytes")
    rest = (*rest, "error", "compile_seconds")
    return {**first, **_times(row.times), **_fields(row, rest)}


def _fields(row: Measurement | Decoding, names: Sequence[str]) -> dict[str, Any]:
    return {name: getattr(row, name) for name in names}


def _times(times: Times) -> dict[str, float]:
    return dict(
        ratio=times.ratio,
        ratio_p10=times.ratio_p10,
        median_seconds=times.median,
        p10_seconds=times.p10,
        p90_seconds=times.p90,
        rounds=len(times.seconds),
    )
