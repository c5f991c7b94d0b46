"""The table of kernels for CPUs on the page about them, from the registry:

    python -m tests.kernels.page

writes it, and a test compares it.
"""

import pathlib
import sys

import numpy as np

import eqquant as eqq
import eqquant.kernels._table as table
from eqquant.formats import Layout

from ..helpers import formats


page = pathlib.Path(__file__).parents[2] / "notebooks/kernels.md"
_begin, _end = "<!-- kernels -->\n", "<!-- end of kernels -->\n"


def kernel_table() -> str:
    """The table, in Markdown."""
    lines = ["| kernel | for | error | how |", "|---|---|---|---|"]
    found = {}
    for entry, kernel in table._table:
        if "cpu" in entry.platforms:
            found.setdefault(kernel.name, []).append((entry, kernel))
    for name, entries in found.items():
        what = dict.fromkeys(t.__name__ for entry, _ in entries for t in entry.formats)
        text = ", ".join(f"`{name}`" for name in what)
        if not any(type(None) in entry.activations for entry, _ in entries):
            text += ", with `x` in `Int8()`"
        if all("matmul_transposed" not in entry.products for entry, _ in entries):
            text += "; along the blocks"
        kernel = entries[0][1]
        lines.append(f"| `{name}` | {text} | {_error(kernel)} | {kernel.about} |")
    about = table._reference.about
    lines.append(f"| `reference` | every format and platform | 1e-5 | {about} |")
    return "\n".join(lines) + "\n"


def _error(kernel):
    found = {kernel.error}
    if callable(kernel.error):
        problems = map(_problem, formats.values())
        found = {kernel.error(p) for p in problems if isinstance(p.format, _decoded)}
    low, high = (
        f"{error:.0e}".replace("e-0", "e-") for error in (min(found), max(found))
    )
    text = low if low == high else f"{low} to {high}"
    return f"{text} *" if kernel.provided else text


_decoded = (eqq.AbstractGrid, eqq.formats.AbstractGGUFBlocks)


def _problem(format):
    return eqq.Problem(
        product="matmul",
        platform="cpu",
        layout=Layout(format, 0, -1),
        activation=None,
        rows=64,
        n=1024,
        k=1024,
        stack=1,
        dtype=np.dtype(np.float32),
        precision=None,
    )


def parts() -> tuple[str, str, str]:
    """The page before the table, the table, and the page after it."""
    before, found = page.read_text("utf-8").split(_begin)
    found, after = found.split(_end)
    return before + _begin, found, _end + after


def main() -> int:
    before, _, after = parts()
    page.write_text(f"{before}\n{kernel_table()}\n{after}", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
