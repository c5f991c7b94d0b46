"""Tables in Markdown, and as `notebooks/figures/draw.py` reads them."""

import csv
import io


def markdown(header, lines):
    """A table. Its first column is to the left, the others to the right."""
    rules = [":--", *["--:"] * (len(header) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (header, rules, *lines))


def all_of(rows):
    """A line for each row."""
    header = ("format", "method", "bits", "change, nats per token")
    header += ("divergence", "same favourite", "CPU s")
    return markdown(header, [row.cells() for row in rows])


def changes(rows):
    """A line for each format: the change of the loss by each method."""
    methods = [*dict.fromkeys(row.method for row in rows)]
    found = {}
    for row in rows:
        cell = f"{row.loss.change:+.3f} ± {row.loss.change_error:.3f}"
        found.setdefault((row.format, f"{row.bits:.2f}"), {})[row.method] = cell
    lines = [
        (f"`{format}`", bits, *(cells.get(method, "") for method in methods))
        for (format, bits), cells in found.items()
    ]
    return markdown(("format", "bits", *methods), lines)


def in_csv(rows):
    """A line for each row."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    header = ("format", "method", "bits_per_weight", "change", "error", "divergence")
    writer.writerow(header)
    for row in rows:
        loss = row.loss
        numbers = (row.bits, loss.change, loss.change_error, loss.divergence)
        writer.writerow((row.format, row.method, *(f"{x:.4f}" for x in numbers)))
    return file.getvalue()
