import io
import shutil
from collections.abc import Sequence
from typing import Any

import wadler_lindig as wl

from .._any_encoding import encodable
from .._tree import printable


def short_bytes(nbytes: int) -> str:
    """Formats a number of bytes to three digits: `2.41 MB`."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB"):
        size /= 1000
        text = f"{size:#.3g}".rstrip(".")
        if float(text) < 1000:
            return f"{text} {unit}"
    return f"{size / 1000:.2f} TB"


def short_array(shape: tuple[int, ...], dtype: str) -> str:
    """Formats the dtype and the shape of an array: `f32[512,784]`."""
    return wl.pformat(wl.array_summary(shape, dtype, kind=None))


def plain(renderable: Any) -> str:
    """Returns the text that rich prints, without colours, for the width and the
    encoding of the terminal."""
    from rich.console import Console

    width = shutil.get_terminal_size().columns
    # Without `force_jupyter=False`, rich would display it in a notebook, instead of
    # returning text.
    console = Console(
        file=io.StringIO(), width=width, color_system=None, force_jupyter=False
    )
    with console.capture() as capture:
        console.print(renderable)
    # (Without colours, the only escape sequences are in names.)
    lines = capture.get().removesuffix("\n").split("\n")
    return encodable("\n".join(printable(line).rstrip() for line in lines))


_gap = "  "
_indent = "    "


class Aligned:
    """Lines of aligned cells. The first cell of a line is its name, which is never cut:
    if the lines would be too wide, each name gets a line of its own, above the cells.
    """

    def __init__(self, lines: Sequence[tuple[str, ...]], alignment: str, width: int):
        """**Arguments:**

        - `lines`: lines of cells. If a line has fewer cells than there are columns, the
            last may extend into the columns that follow.
        - `alignment`: `l` or `r` for each column.
        - `width`: the width of the console.
        """
        full = [line for line in lines if len(line) == len(alignment)]
        columns = range(1, len(alignment))
        self.alignment = alignment[1:]
        self.widths = [max((len(line[i]) for line in full), default=0) for i in columns]
        self.name_width = max(len(line[0]) for line in lines)
        rest = max(len(self._rest(line)) for line in lines)
        beside = self.name_width + len(_gap) + rest
        below = max(self.name_width, len(_indent) + rest)
        self.is_beside = beside <= width
        self.width = beside if self.is_beside else min(below, width)

    def write(self, line: tuple[str, ...]) -> str:
        if self.is_beside:
            return line[0].ljust(self.name_width) + _gap + self._rest(line)
        return f"{line[0]}\n{_indent}{self._rest(line)}"

    def _rest(self, line):
        _, *cells = line
        texts = [
            cell.rjust(width) if letter == "r" else cell.ljust(width)
            for cell, width, letter in zip(cells, self.widths, self.alignment)
        ]
        return _gap.join(texts).rstrip()
