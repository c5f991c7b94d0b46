import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
from rich.box import MARKDOWN, SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..._any_encoding import any_encoding
from ...formats import Int4, Int8, NF4, Ternary
from .._entries import progress_bar
from .._formats import Quantization
from ._measure import GPUMeasurement, measure_gpu


# Few rows, as when a model generates text, and many, as when it reads a prompt.
decode_shapes = ((4096, 4096), (4096, 14336), (8192, 8192), (8192, 28672))
decode_rows = (1, 4, 16)
prefill_shapes = ((8192, 8192),)
prefill_rows = (256, 4096)

default_cases = (
    *[(shape, m) for shape in decode_shapes for m in decode_rows],
    *[(shape, m) for shape in prefill_shapes for m in prefill_rows],
)
gpu_formats = (
    Quantization(Int8()),
    Quantization(Int8(), Int8()),
    Quantization(NF4()),
    Quantization(Int4()),
    Quantization(Ternary()),
)

gpu_caption = (
    "Copy: the rate at which the weight is read, as a share of the rate at which this "
    "GPU copies memory. Ratio: speed relative to bfloat16. Error: the largest error, "
    "relative to |x| @ |w|."
)


@any_encoding()
def run_gpu(
    cases: Sequence[tuple[tuple[int, int], int]] = default_cases,
    formats: Sequence[Quantization] = gpu_formats,
    *,
    out: str | os.PathLike[str] = "eqquant-bench",
    console: Console | None = None,
    **kwargs: Any,
) -> list[GPUMeasurement]:
    """Measures products on a GPU, prints a table of them, and writes `gpu.json`.

    **Arguments:**

    - `cases`, `formats`, `kwargs`: as in `measure_gpu`.
    - `out`: the folder for `gpu.json`.
    - `console`: the console to print to.

    **Returns:**

    The `GPUMeasurement`s.
    """
    console = Console() if console is None else console
    with progress_bar(console) as show:
        rows = measure_gpu(cases, formats, show=show, **kwargs)
    device = jax.devices()[0].device_kind
    console.print(
        Text(f"{device}, {rows[0].copy / 1e12:.2f} TB/s; JAX {jax.__version__}.\n"),
        gpu_table(rows),
        Text(f"\n{gpu_caption}"),
    )
    wrong = [row for row in rows if not row.is_right]
    for row in wrong:
        text = f"{row.name}, {row.rows} rows: error {row.error:.0e} > {row.bound:.0e}"
        console.print(Text(text, "red"))
    path = pathlib.Path(out) / "gpu.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    products = [dataclasses.asdict(row) for row in rows]
    content = {"device": device, "jax": jax.__version__, "products": products}
    path.write_text(json.dumps(content, indent=1), "utf-8")
    console.print(Text(f"\nWrote {path}."))
    return rows


def read_gpu(path: str | os.PathLike[str]) -> list[GPUMeasurement]:
    """Reads the measurements in a file that `run_gpu` wrote."""
    products = json.loads(pathlib.Path(path).read_text("utf-8"))["products"]
    return [
        GPUMeasurement(**(row | {"shape": tuple(row["shape"])})) for row in products
    ]


def gpu_table(rows: Sequence[GPUMeasurement], markdown: bool = False) -> Table:
    """Returns a table with a row for each measurement, in Markdown on request."""
    table = Table(box=MARKDOWN if markdown else SIMPLE_HEAD, show_edge=markdown)
    table.add_column("format")
    table.add_column("kernel")
    for column in ("weight", "rows", "µs", "copy", "ratio", "error"):
        table.add_column(column, justify="right")
    for row in rows:
        k, n = row.shape
        table.add_row(
            Text(row.name),
            row.kernel or "",
            f"{k}x{n}",
            str(row.rows),
            f"{1e6 * row.seconds:.1f}",
            f"{row.bandwidth:.0%}",
            f"{row.ratio:.2f}",
            f"{row.error:.0e}",
            style=None if row.is_right else "red",
        )
    return table
