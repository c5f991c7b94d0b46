import dataclasses
import glob
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from .._array import check_number
from .._tree import Rules
from ..formats import AbstractFormat
from ._allocation_figure import allocation_figure
from ._text import plain


@dataclasses.dataclass(frozen=True)
class SensitivityRow:
    """The size and the error in each format of weights that get the same format.

    - `paths`: the path of one weight, or of several that share an array or a key of
        `together`.
    - `size`: the number of their elements.
    - `bits`: bits per weight in each format, scales included.
    - `errors`: the error in each format.
    """

    paths: tuple[str, ...]
    size: int
    bits: tuple[float, ...]
    errors: tuple[float, ...]


@dataclasses.dataclass(frozen=True, repr=False)
class Sensitivity:
    """The error of each weight of a model in each of several formats, as measured by
    [`eqquant.sensitivity`][]. It prints as a table.

    - `rows`: a `SensitivityRow` for each weight.
    - `formats`: the formats.
    - `measure`: a description of the errors.
    """

    rows: tuple[SensitivityRow, ...]
    formats: tuple[AbstractFormat, ...]
    measure: str

    def allocate(self, bits: float | int = 4.0) -> Rules:
        """Chooses the format of each weight that minimises the sum of the errors within
        a budget of bits.

        **Arguments:**

        - `bits`: the largest mean of bits per weight, scales included.

        **Returns:**

        [`eqquant.Rules`][] with a rule for each weight.

        **Raises:**

        A `ValueError` if `bits` is less than the smallest formats take.
        """
        chosen = self.chosen(bits)
        return Rules(
            [
                (glob.escape(path), self.formats[i])
                for row, i in zip(self.rows, chosen)
                for path in row.paths
            ]
        )

    def curve(self, bits: Sequence[float | int]) -> list[tuple[float, float]]:
        """Returns the mean of bits per weight that is used, and the sum of the errors,
        within each of the budgets `bits`."""
        found = []
        for most in bits:
            chosen = list(zip(self.rows, self.chosen(most)))
            used = sum(row.size * row.bits[i] for row, i in chosen)
            error = sum(row.errors[i] for row, i in chosen)
            found.append((used / self._size, error))
        return found

    def figure(self, bits: Sequence[float | int] | None = None) -> Any:
        """Plots the formats that are chosen within each budget, and the sum of the
        errors against the bits that are used.

        **Arguments:**

        - `bits`: the budgets. By default they are half a bit apart, from the smallest
            formats to the largest.

        **Returns:**

        A `matplotlib.figure.Figure`: `.savefig(path)` writes it.
        """
        if bits is None:
            least, most = self._extremes
            halves = range(math.ceil(2 * least), math.floor(2 * most) + 1)
            bits = [i / 2 for i in halves] or [float(most)]
        return allocation_figure(self, bits)

    @property
    def _size(self):
        return sum(row.size for row in self.rows)

    @property
    def _extremes(self):
        costs = np.array([[row.size * b for b in row.bits] for row in self.rows])
        return (np.sum(end(costs, axis=1)) / self._size for end in (np.min, np.max))

    def chosen(self, bits: float | int) -> list[int]:
        """Returns, for each row, the index of the format that `allocate` chooses."""
        # This is the multiple-choice knapsack problem: `x[r, f]` is one where the
        # weights of row `r` have the format `f`.
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array

        check_number("bits", bits)
        costs = np.array([[row.size * b for b in row.bits] for row in self.rows])
        costs /= self._size
        # A loss may decrease by chance.
        errors = np.maximum([row.errors for row in self.rows], 0)
        least, _ = self._extremes
        if not least <= bits + 1e-9:
            raise ValueError(
                f"`bits` should be at least {least:.4g}, the size of the weights in "
                f"their smallest formats. Got {bits}."
            )
        starts = np.arange(0, costs.size + 1, len(self.formats))
        one_each = csr_array((np.ones(costs.size), np.arange(costs.size), starts))
        constraints = [
            LinearConstraint(one_each, 1, 1),
            # Multiplied by 100, since the solver tolerates a violation of 1e-6.
            LinearConstraint(100 * costs.reshape(1, -1), -np.inf, 100 * bits + 1e-7),
        ]
        # The solver stops within 1e-6 of the largest error, which may exceed the sum of
        # all chosen errors. So it runs again, without errors above the sum just found.
        total = np.inf
        while True:
            allowed = errors <= total * (1 + 1e-9)
            unit = np.max(errors[allowed]) or 1
            most: Any = allowed.ravel().astype(float)
            found = milp(
                np.where(allowed, errors / unit, 0).ravel(),
                integrality=np.ones(errors.size),
                bounds=Bounds(0, most),
                constraints=constraints,
                options={"mip_rel_gap": 1e-6},
            )
            if not found.success:
                raise RuntimeError(f"The solver found no formats: {found.message}")
            chosen = np.argmax(found.x.reshape(errors.shape), axis=1)
            before, total = total, np.sum(errors[np.arange(len(errors)), chosen])
            if not total < before / 2:
                return chosen.tolist()

    def __repr__(self) -> str:
        return plain(self)

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        costs = [[row.size * b for b in row.bits] for row in self.rows]
        bits = [f"{sum(c) / self._size:.2f}" for c in zip(*costs)]
        width = max(map(len, bits))
        legend = [f"{b:>{width}} bits  {f}" for b, f in zip(bits, self.formats)]
        table = Table(
            box=SIMPLE_HEAD,
            show_edge=False,
            pad_edge=False,
            caption=Text("\n".join(["", *legend, "", self.measure])),
            caption_justify="left",
        )
        table.add_column("weight", overflow="fold")
        for title in ("numbers", *bits):
            table.add_column(title, justify="right", no_wrap=True)
        for row in self.rows:
            errors = [f"{e:.3g}" for e in row.errors]
            table.add_row(Text("\n".join(row.paths)), f"{row.size:,}", *errors)
        yield table
