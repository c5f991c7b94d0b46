from typing import Any


def axes_of_bits(width: float, height: float, label: str) -> tuple[Any, Any]:
    """Returns a figure of a size in inches, and axes for a plot against bits per
    weight."""
    # (Unlike pyplot, this needs no display.)
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bits per weight, scales included")
    axes.set_ylabel(label)
    return figure, axes
