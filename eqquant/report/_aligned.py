from collections.abc import Sequence


_gap = "  "
_indent = "    "


class Aligned:
    """Lines of cells, below one another. The first cell of a line is its name, and is
    never cut: where the lines would be too wide, it stands above the others, on a line
    of its own.
    """

    def __init__(self, lines: Sequence[tuple[str, ...]], alignment: str, width: int):
        """**Arguments:**

        - `lines`: cells. Where there are fewer of them than columns, the last may reach
            into the columns that follow.
        - `alignment`: for each column, `l` or `r`.
        - `width`: of the console.
        """
        full = [line for line in lines if len(line) == len(alignment)]
        columns = range(1, len(alignment))
        self.name = max(len(line[0]) for line in lines)
        self.widths = [max((len(line[i]) for line in full), default=0) for i in columns]
        self.alignment = alignment[1:]
        rest = sum(self.widths) + len(_gap) * (len(self.widths) - 1)
        self.beside = self.name + len(_gap) + rest <= width
        beside, below = (
            self.name + len(_gap) + rest,
            max(self.name, len(_indent) + rest),
        )
        self.width = beside if self.beside else below

    def write(self, line: tuple[str, ...]) -> str:
        name, *cells = line
        texts = [
            cell.rjust(size) if letter == "r" else cell.ljust(size)
            for cell, size, letter in zip(cells, self.widths, self.alignment)
        ]
        text = _gap.join(texts).rstrip()
        if self.beside:
            return name.ljust(self.name) + _gap + text
        return f"{name}\n{_indent}{text}"
