import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .._any_encoding import any_encoding
from .._array import quantize
from ..formats import AbstractExact, AbstractFormat, as_format
from ._clock import Clock, Times
from ._entries import Meter, progress_bar, Show


caption = (
    "The speed at which an array of the shape 4096x4096 is quantized along axis {axis} "
    "and dequantized, in megabytes of float32 per second; and as a share of the speed "
    "at which it is copied, on one thread, to allocated memory."
)
_formats = (
    *("int8", "int8(64)", "nf4", "int4", "ternary", "binary", "fp8", "mxfp4", "nvfp4"),
    *("q4_0", "q8_0", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k", "iq4_nl", "iq4_xs"),
)


@dataclasses.dataclass(frozen=True)
class Conversion:
    """The speed at which a format quantizes and dequantizes arrays.

    - `name`: the format.
    - `nbytes`: the size of the array in bytes, in float32.
    - `quantize`, `dequantize`: the times of each, next to the times of a copy.
    """

    name: str
    nbytes: int
    quantize: Times
    dequantize: Times


def measure_conversions(
    formats: Sequence[AbstractFormat | str] = _formats,
    *,
    shape: tuple[int, int] = (4096, 4096),
    axis: int = -2,
    budget: float | int = 30,
    min_rounds: int = 3,
    show: Show | None = None,
) -> list[Conversion]:
    """Measures [`eqquant.quantize`][] and [`eqquant.dequantize`][] on this machine.

    **Arguments:**

    - `formats`: formats, or names of formats.
    - `shape`, `axis`: the shape of the array, and the axis to quantize along.
    - `budget`: the seconds for which to call them, once they are compiled.
    - `min_rounds`: the minimum number of calls of each.
    - `show`: as in [`eqquant.bench.measure_decoding`][].

    **Returns:**

    A list of [`eqquant.bench.Conversion`][].
    """
    w = np.random.default_rng(0).standard_normal(shape, np.float32)
    copy = np.empty_like(w)
    wanted = [as_format(format) for format in formats]
    meter = Meter(float(budget), show)
    found = []
    for format in wanted:
        exact = isinstance(format, AbstractExact)
        numbers = jnp.asarray((w > 0).astype(np.float32) if exact else w)
        q = quantize(numbers, format, axis=axis)
        calls = (
            lambda: np.copyto(copy, w),
            lambda: jax.block_until_ready(quantize(numbers, format, axis=axis)),
            lambda: jax.block_until_ready(q.dequantize()),
        )
        clock = Clock(budget / len(wanted), min_rounds, settle=0)
        name = str(format)
        _, *times = clock(calls, lambda seconds: meter.add(seconds, name))
        found.append(Conversion(name, w.nbytes, *times))
    return found


@any_encoding()
def run_conversions(
    formats: Sequence[AbstractFormat | str] | None = None,
    *,
    axis: int = -2,
    console: Console | None = None,
) -> list[Conversion]:
    """Prints a table of the results of [`eqquant.bench.measure_conversions`][].

    **Arguments:**

    - `formats`: formats, or names of formats. By default, several.
    - `axis`: the axis to quantize along.
    - `console`: the console to print to.

    **Returns:**

    The results.
    """
    console = Console() if console is None else console
    formats = _formats if formats is None else formats
    with progress_bar(console) as show:
        measured = measure_conversions(formats, axis=axis, show=show)
    console.print(conversion_table(measured))
    console.print(Text(f"\n{caption.format(axis=axis)}"))
    return measured


def conversion_table(measured: Sequence[Conversion]) -> Table:
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("format")
    for name in ("quantize", "dequantize"):
        table.add_column(f"{name},\nMB/s", justify="right")
        table.add_column("% of\ncopy", justify="right")
    for row in measured:
        cells = []
        for times in (row.quantize, row.dequantize):
            rate = row.nbytes / times.median / 1e6
            cells += [f"{rate:.0f}", f"{100 * times.ratio:.0f}"]
        table.add_row(Text(row.name), *cells)
    return table
