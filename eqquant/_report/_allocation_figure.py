from typing import Any

import numpy as np


# In inches: the height of the row of a weight, and of everything around the rows.
_row, _around = 0.28, 1.6


def allocation_figure(found: Any, bits: Any) -> Any:
    """Plots the formats that an [`eqquant.Sensitivity`][] chooses within each of
    several budgets, and the sum of the errors."""
    # (Unlike pyplot, this needs no display.)
    from matplotlib.figure import Figure
    from matplotlib.ticker import FormatStrFormatter

    chosen = np.array([found.chosen(budget) for budget in bits]).T
    used, errors = zip(*found.curve(bits))
    height = max(3.2, _around + _row * len(found.rows))
    figure = Figure(figsize=(11, height), layout="constrained")
    curve, weights = figure.subplots(1, 2, width_ratios=(2, 3))

    curve.plot(used, errors, "o-", color="C0")
    curve.spines[["top", "right"]].set_visible(False)
    if min(errors) > 0:
        curve.set_yscale("log")
    curve.set_xlabel("bits per weight that are used")
    curve.set_ylabel("sum of the errors")

    number = len(found.formats)
    colors = weights.imshow(
        chosen, cmap=_colors(number), vmin=-0.5, vmax=number - 0.5, aspect="auto"
    )
    weights.set_xticks(range(len(bits)), [f"{budget:g}" for budget in bits])
    weights.set_yticks(range(len(found.rows)), [row.paths[0] for row in found.rows])
    weights.tick_params(length=0, labelsize=9)
    weights.spines[:].set_visible(False)
    weights.set_xlabel("budget, bits per weight")
    legend = figure.colorbar(colors, ax=weights, ticks=range(number))
    legend.ax.set_yticklabels([str(format) for format in found.formats], fontsize=9)
    legend.ax.tick_params(length=0)
    legend.outline.set_visible(False)
    curve.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    return figure


def _colors(number):
    from matplotlib import colormaps

    return colormaps["viridis"].resampled(max(number, 1))
