"""Draws `loss.svg` and `speed.svg` from the tables beside this file.

`python -m tests.real_models table --csv` wrote `loss.csv`. `speed.csv` holds the ratios
of medians that `eqquant bench` printed, which are in `../measurements.md`. The figures
have no background, and one grey that can be read on white and on black.
"""

import csv
import pathlib

import matplotlib
from matplotlib.figure import Figure


here = pathlib.Path(__file__).parent
grey = "#808080"
matplotlib.rcParams.update(
    {
        "axes.edgecolor": grey,
        "axes.labelcolor": grey,
        "font.size": 11,
        "svg.hashsalt": "eqquant",
        "text.color": grey,
        "xtick.color": grey,
        "ytick.color": grey,
    }
)


def _read(name):
    with open(here / name, newline="") as file:
        return list(csv.DictReader(file))


def _save(figure, name):
    figure.savefig(here / name, transparent=True, metadata={"Date": None})


def _axes(axes):
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bits per weight, scales included")
    axes.minorticks_off()
    return axes


# The label of each format in the figure of loss, where it stands, and on which side.
labels = {
    "Int8()": ("Int8()", (-8, 0), "right"),
    "FP8()": ("FP8()", (-8, 0), "right"),
    "MXFP4()": ("MXFP4()", (-8, 0), "right"),
    "NF4()": ("NF4()", (-8, -4), "right"),
    "Int4()": ("Int4()", (8, 4), "left"),
    "Int(3)": ("Int(3)", (0, 10), "center"),
    'Int(2, offset="minimum")': ("Int(2), minima", (8, 0), "left"),
}


def _shown(row):
    """A row as the figure shows it: rotated formats in sequence as the inner format,
    and trellises that were also trained as one method."""
    format, method = row["format"], row["method"]
    if "Trellis" in format:
        return row | {"method": "trellis" if method == "Sequential, tuned" else None}
    if not format.startswith("Rotated(") or method != "Sequential":
        return row
    return row | {"format": format[len("Rotated(") : -1], "method": "rotated"}


def draw_loss():
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    axes = _axes(figure.subplots())
    axes.set_ylabel("loss above float32, nats per token")
    axes.set_yscale("log")
    styles = {
        "nearest": dict(label="rounded to nearest", marker="o", color="#e5534b"),
        "GPTQ": dict(label="GPTQ", marker="^", color="#2ea043"),
        "Sequential": dict(label="GPTQ, Sequential", marker="D", color="#4184e4"),
        "rotated": dict(label="GPTQ, Sequential, rotated", marker="s", color="#986ee2"),
        "trellis": dict(label="the same, trellis, tuned", marker="*", color="#d4772b"),
    }
    rows = [_shown(row) for row in _read("loss.csv")]
    for method, style in styles.items():
        points = [
            [float(row[key]) for key in ("bits_per_weight", "change", "error")]
            for row in rows
            if row["method"] == method
            and (row["format"] in labels or method == "trellis")
        ]
        bits, change, error = zip(*points)
        axes.errorbar(bits, change, error, linestyle="", elinewidth=1, **style)
    for row in rows:
        if row["method"] == "nearest" and row["format"] in labels:
            text, offset, side = labels[row["format"]]
            axes.annotate(
                text,
                (float(row["bits_per_weight"]), float(row["change"])),
                xytext=offset,
                textcoords="offset points",
                ha=side,
                va="center",
            )
    axes.set_yticks([0.001, 0.01, 0.1, 1, 10], [".001", ".01", ".1", "1", "10"])
    axes.minorticks_off()
    axes.legend(frameon=False, loc="upper right")
    _save(figure, "loss.svg")


# The color of each format in the figure of speed; how far right its point is moved,
# since NF4 and Int4 have the same bits; and where its label stands.
places = {
    "Binary()": ("#986ee2", 0, (-8, 11), "left"),
    "Ternary()": ("#2ea043", 0, (8, 2), "left"),
    "NF4()": ("#e5534b", -0.12, (0, -11), "right"),
    "Int4()": ("#d4772b", 0.12, (7, 0), "left"),
    "Int8()": ("#4184e4", 0, (7, 0), "left"),
    "Int8(), x Int8()": ("#4184e4", 0, (-7, 0), "right"),
}


def draw_speed():
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, m in zip(panels, ("1", "128")):
        _axes(axes).set_title("1 row" if m == "1" else f"{m} rows", fontsize=11)
        axes.set_yscale("log", base=2)
        axes.axhline(1, color=grey, linewidth=1)
        for row in _read("speed.csv"):
            if row["rows"] != m:
                continue
            bits, native, xla = (
                float(row[key]) for key in ("bits_per_weight", "native", "xla")
            )
            color, shift, offset, side = places[row["format"]]
            axes.plot(bits + shift, native, "o", color=color)
            axes.plot(bits + shift, xla, "o", color=color, fillstyle="none")
            axes.annotate(
                row["format"],
                (bits + shift, native),
                xytext=offset,
                textcoords="offset points",
                ha=side,
                va="center",
                fontsize=10,
            )
        axes.annotate(
            "float32, 32 bits",
            (10, 1),
            xytext=(0, 5),
            textcoords="offset points",
            ha="right",
            fontsize=10,
        )
        axes.set_xlim(0, 10)
        axes.set_xticks([1, 2, 4, 8])
        axes.set_ylim(0.6, 24)
        axes.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
        axes.minorticks_off()
    panels[0].set_ylabel("times as fast as float32")
    handles = [
        matplotlib.lines.Line2D(
            [], [], marker="o", linestyle="", color=grey, fillstyle=fill, label=label
        )
        for fill, label in (
            ("full", "with the native library"),
            ("none", "without it: kernels in XLA"),
        )
    ]
    panels[1].legend(handles=handles, frameon=False, loc="upper right")
    _save(figure, "speed.svg")


if __name__ == "__main__":
    draw_loss()
    draw_speed()
