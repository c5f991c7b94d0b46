from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ..._report import explain
from ...formats import Int4, Int8
from .._entries import Show
from .._formats import all_formats, Quantization
from ._costs import product, times


class Cell(NamedTuple):
    """A product, and the times of its kernels.

    - `chosen`: the name of the kernel that is chosen for the product.
    - `seconds`: the time of each kernel, on one core.
    """

    quantization: Quantization
    shape: tuple[int, int]
    rows: int
    chosen: str
    seconds: dict[str, float]

    @property
    def best(self) -> str:
        """The name of the fastest kernel."""
        return min(self.seconds, key=lambda name: self.seconds[name])

    @property
    def ratio(self) -> float:
        """The time of the chosen kernel, relative to the fastest one."""
        return self.seconds[self.chosen] / self.seconds[self.best]


def measure_choices(
    shapes: Sequence[tuple[int, int]] = ((4096, 4096), (1536, 1536)),
    rows: Sequence[int] = (1, 2, 4, 8, 16, 64, 128),
    quantizations: Sequence[Quantization] | None = None,
    *,
    across: bool = False,
    show: Show | None = None,
) -> list[Cell]:
    """Times all kernels that can compute some products, including the chosen one, by
    the processor time on one core. (Kernels are left out that are predicted to take
    more than three times as long as the fastest.)"""
    if quantizations is None:
        others = [Quantization(Int4(), Int8())]
        quantizations = [*all_formats(), *others]
    cells = []
    wanted = [(q, s, m) for q in quantizations for s in shapes for m in rows]
    for i, (quantization, shape, m) in enumerate(wanted):
        if show is not None:
            show(i / len(wanted), f"{quantization}, {m} rows")
        found = product(quantization, shape, m, across=across)
        assert found is not None
        told = explain(found.x, found.q.T if across else found.q)
        assert told.kernel is not None
        most = 3 * min(told.seconds.values())
        names = [name for name, s in told.seconds.items() if s <= most]
        names = list(dict.fromkeys([told.kernel, *names]))
        its = times([found.by(name) for name in names])
        seconds = dict(zip(names, its))
        cells.append(Cell(quantization, shape, m, told.kernel, seconds))
    return cells


def print_choices(cells: Sequence[Cell], console: Console) -> None:
    """Prints how much longer the chosen kernels take than the fastest ones."""
    shapes = dict.fromkeys(cell.shape for cell in cells)
    rows = list(dict.fromkeys(cell.rows for cell in cells))
    for shape in shapes:
        size = "x".join(map(str, shape))
        table = Table("format", *(f"{m}" for m in rows), title=f"{size}, rows:")
        mine = [cell for cell in cells if cell.shape == shape]
        for quantization in dict.fromkeys(cell.quantization for cell in mine):
            its = [cell for cell in mine if cell.quantization == quantization]
            table.add_row(str(quantization), *(f"{cell.ratio:.2f}" for cell in its))
        console.print(table)
    for cell in cells:
        if cell.ratio > 1.1:
            size = "x".join(map(str, cell.shape))
            console.print(
                Text(
                    f"{cell.quantization}, {size}, {cell.rows} rows: {cell.chosen} "
                    f"takes {cell.ratio:.2f} times as long as {cell.best}."
                )
            )
    ratios = [cell.ratio for cell in cells]
    mean = float(np.exp(np.mean(np.log(ratios))))
    text = f"{len(cells)} products: mean {mean:.3f}, worst {max(ratios):.2f}."
    console.print(Text(text))
