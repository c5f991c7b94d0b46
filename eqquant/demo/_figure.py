import pathlib
from collections.abc import Sequence

from ._axes import axes_of_bits
from ._table import Row


_line = 14  # in points


def write_figure(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Plots loss against bits per weight. The first row is the dense model."""
    dense, *quantized = rows
    figure, axes = axes_of_bits(7.0, 4.5, "loss on held-out text, nats per byte")
    axes.set_xlim(0, 12)
    axes.axhline(dense.nats_per_byte, color="0.6", linewidth=1, zorder=0)
    axes.annotate(
        f"{dense.format}  {dense.nats_per_byte:.4f}",
        (12, dense.nats_per_byte),
        xytext=(0, -_line),
        textcoords="offset points",
        ha="right",
        color="0.4",
    )
    for row in quantized:
        axes.plot(row.bits_per_weight, row.nats_per_byte, "o", color=_color(row))
    axes.margins(y=0.1)
    figure.draw_without_rendering()
    for row, height in _heights(axes.transData.transform, 72 / figure.dpi, quantized):
        axes.annotate(
            _label(row),
            (row.bits_per_weight, row.nats_per_byte),
            xytext=(4, height),
            textcoords="offset points",
            fontsize=9,
            arrowprops=dict(arrowstyle="-", color=_color(row), relpos=(0, 0)),
        )
    figure.savefig(path, dpi=150)


def _heights(to_pixels, points, rows):
    """Yields the height of each label above its point, so that labels do not overlap.
    Labels further to the left are higher."""
    placed = []
    order = lambda row: (-row.bits_per_weight, row.nats_per_byte)
    for row in sorted(rows, key=order):
        x, y = points * to_pixels((row.bits_per_weight, row.nats_per_byte))
        width = 5.5 * len(_label(row))
        top = y + _line
        while any(x + width > left and abs(top - t) < _line for left, t in placed):
            top += 1
        placed.append((x, top))
        yield row, top - y


def _label(row):
    return f"{row.format}, {row.method}  {row.change:+.4f}"


def _color(row):
    return {"nearest": "C0", "GPTQ": "C1", "trained": "C2"}[row.method]
