import collections
import itertools as it
import os
from collections.abc import Sequence

import jax
from rich.console import Console
from rich.table import Table

from eqquant.kernels.native import _library as library


_columns = ("cases", "kind", "format", "kernel", "transform", "inputs", "weights")


def header(seed: int) -> str:
    missing = library.missing()
    native = f"native, {sorted(library.features())}" if missing is None else missing
    return f"JAX {jax.__version__}, {native}, {os.cpu_count()} cores, seed {seed}"


def show(
    seed: int, met: collections.Counter, failures: Sequence[tuple[int, str]]
) -> None:
    """What was checked, how often; and a line for each check that failed, after the
    command that repeats it."""
    console = Console(width=160, soft_wrap=True)
    table = Table(title=header(seed))
    for column in _columns:
        table.add_column(column)
    by_column = [
        sorted((-count, name) for (c, name), count in met.items() if c == column)
        for column in _columns
    ]
    for row in it.zip_longest(*by_column):
        table.add_row(*["" if x is None else f"{x[1]} {-x[0]}" for x in row])
    console.print(table)
    for number, line in failures:
        command = f"python -m tests.attack --seed {seed} --case {number}"
        console.print(f"{command}: {line}", markup=False, highlight=False)
    cases = sum(count for (column, _), count in met.items() if column == "cases")
    console.print(f"{cases} cases, {met['check', '']} checks, {len(failures)} failed")
