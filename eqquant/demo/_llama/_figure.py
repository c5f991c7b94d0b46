import pathlib
from collections.abc import Sequence
from typing import Any

from .._axes import axes_of_bits
from ._rows import LlamaRow


_label: dict[str, Any] = {"textcoords": "offset points", "fontsize": 9}


def write_figure(path: pathlib.Path, rows: Sequence[LlamaRow]) -> None:
    """Plots perplexity, on a logarithmic axis, against bits per weight. The first row
    is the dense model."""
    from matplotlib.ticker import LogLocator, NullFormatter, ScalarFormatter

    dense, *quantized = rows
    figure, axes = axes_of_bits(7.0, 4.5, "perplexity on held-out text, per token")
    axes.axhline(dense.perplexity, color="0.6", linewidth=1, zorder=0)
    axes.annotate("float32", (0.1, dense.perplexity), (0, -12), color="0.4", **_label)
    axes.set_yscale("log")
    colors = {"nearest": "C0", "the file": "C2", "GPTQ": "C1"}
    for row in quantized:
        point = row.bits_per_weight, row.perplexity
        axes.plot(*point, "o", color=colors[row.method])
        text = f"{row.format}, {row.method}"
        # On both sides, so that labels do not overlap.
        side = -1 if row.method == "GPTQ" else 1
        ha = "left" if side > 0 else "right"
        axes.annotate(text, point, (6 * side, 3), ha=ha, **_label)
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
    axes.yaxis.set_major_formatter(ScalarFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(0, 1.25 * max(row.bits_per_weight for row in quantized))
    axes.margins(y=0.15)
    figure.savefig(path, dpi=150)
