import pathlib
from collections.abc import Sequence

from ._table import Row


def write_figure(path: pathlib.Path, rows: Sequence[Row]) -> None:
    """Plots loss against bits per weight. The first row is the model before it was
    quantized."""
    # Not pyplot, which would choose a window system.
    from matplotlib.figure import Figure

    dense, *quantized = rows
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    axes.axhline(dense.nats_per_byte, color="0.5", linewidth=1, linestyle="--")
    axes.annotate(
        f"{dense.format} ({dense.nats_per_byte:.3f})",
        (1, dense.nats_per_byte),
        xycoords=("axes fraction", "data"),
        xytext=(-4, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        color="0.4",
    )
    for row in quantized:
        axes.plot(row.bits_per_weight, row.nats_per_byte, "o", color="C0")
        axes.annotate(
            f"{row.format}  {row.change:+.3f}",
            (row.bits_per_weight, row.nats_per_byte),
            xytext=(6, 5),
            textcoords="offset points",
            fontsize=8,
        )
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel("held-out loss (nats per byte)")
    axes.set_xlim(0, 10)
    figure.savefig(path, dpi=150)
