import pathlib
from collections.abc import Sequence
from typing import Any

from ._candidate import prepacked, xla
from ._measurement import Measurement


_markers = "os^DvP*X"
_fills = ("full", "left", "top", "right", "bottom")


def write_figure(path: pathlib.Path, rows: Sequence[Measurement]) -> None:
    figure(rows).savefig(path, dpi=150)


def figure(rows: Sequence[Measurement]) -> Any:
    """Plots the speed of each product relative to float32 against its bits per weight,
    with a panel for each number of rows. Hollow markers stand for products without the
    native library, and black edges for prepacked weights.

    **Arguments:**

    - `rows`: the result of [`eqquant.bench.measure`][].

    **Returns:**

    A `matplotlib.figure.Figure`.
    """
    # (Unlike pyplot, this needs no display.)
    from matplotlib.figure import Figure

    rows = [row for row in rows if row.failure is None]
    numbers = _distinct(row.rows for row in rows)
    shapes = _distinct(row.shape for row in rows)
    styles = _styles(rows)
    legend = _legend(styles, shapes)
    # The figure must be at least as high as its legend.
    size = 1.8 + 3.6 * len(numbers), max(4.2, 0.5 + 0.2 * len(legend))
    figure = Figure(figsize=size, layout="constrained")
    panels = figure.subplots(1, len(numbers), sharey=True, squeeze=False)[0]
    for axes, m in zip(panels, numbers):
        _prepare(axes, "1 row" if m == 1 else f"{m} rows")
        for row in rows:
            if row.rows == m:
                point = row.bits_per_weight, row.times.ratio
                marker = _markers[shapes.index(row.shape) % len(_markers)]
                axes.plot(*point, marker=marker, **styles[row.name])
    panels[0].set_ylabel("times as fast as float32")
    if len(shapes) == 1:
        figure.suptitle("x @ w[{}, {}]".format(*shapes[0]), fontsize=11)
    figure.legend(handles=legend, loc="outside right upper", frameon=False, fontsize=9)
    return figure


def _prepare(axes, title):
    from matplotlib.ticker import FormatStrFormatter, NullLocator

    axes.set_title(title, fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(FormatStrFormatter("%g"))
        axis.set_minor_locator(NullLocator())
    axes.set_xticks([1, 2, 4, 8, 16, 32])
    axes.set_xlim(0.8, 40)
    axes.set_xlabel("bits per weight, scales included")
    axes.axhline(1, color="0.7", linewidth=1, zorder=0)


def _styles(rows):
    first, *others = _distinct(row.name for row in rows)
    styles = {first: dict(color="k", linestyle="")}
    format = lambda name: name.removesuffix(xla).removesuffix(prepacked)
    formats = _distinct(map(format, others))
    for name in others:
        i = formats.index(format(name))
        fill = "none" if name.endswith(xla) else _fills[i // 10 % len(_fills)]
        style = dict(color=f"C{i % 10}", fillstyle=fill, linestyle="")
        edge = dict(markeredgecolor="k") if name.endswith(prepacked) else {}
        styles[name] = style | edge
    return styles


def _legend(styles, shapes):
    from matplotlib.lines import Line2D

    lines = [
        Line2D([], [], marker="o", label=name, **style)
        for name, style in styles.items()
    ]
    if len(shapes) > 1:
        for marker, shape in zip(_markers, shapes):
            label = "w[{}, {}]".format(*shape)
            line = Line2D([], [], marker=marker, label=label, color="0.6", linestyle="")
            lines.append(line)
    return lines


def _distinct(values):
    return list(dict.fromkeys(values))
