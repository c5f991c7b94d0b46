import pathlib
from collections.abc import Sequence
from typing import Any

from ._axes import axes_of_bits


def write_figure(path: pathlib.Path, rows: Sequence[Any]) -> None:
    """Plots the increase of the loss against bits per weight, with a marker for each
    method, and a line for formats that were chosen within a budget."""
    figure, axes = axes_of_bits(8.0, 5.0, "loss above float32, nats per byte")
    axes.set_yscale("log")
    methods = dict.fromkeys(row.method for row in rows)
    labels: dict[float, tuple[float, list[str]]] = {}
    for i, method in enumerate(methods):
        some = [row for row in rows if row.method == method and row.change > 0]
        chosen = method.startswith("formats")
        style = (
            dict(linestyle="-", marker=".") if chosen else dict(marker="os^D"[i % 4])
        )
        some.sort(key=lambda row: row.bits_per_weight)
        x, y = (
            [getattr(r, name) for r in some] for name in ("bits_per_weight", "change")
        )
        axes.plot(x, y, **{"linestyle": "", "color": f"C{i}", "label": method, **style})
        for row in some if not chosen else ():
            bits = round(row.bits_per_weight, 2)
            high, names = labels.get(bits, (row.change, []))
            names = [*dict.fromkeys((*names, row.format))]
            labels[bits] = max(high, row.change), names
    for bits, (change, names) in labels.items():
        axes.annotate(
            ", ".join(names),
            (bits, change),
            xytext=(2, 7),
            textcoords="offset points",
            rotation=40,
            rotation_mode="anchor",
            fontsize=8,
            color="0.4",
        )
    axes.legend(frameon=False)
    axes.margins(x=0.15, y=0.1)
    figure.savefig(path, dpi=150)
