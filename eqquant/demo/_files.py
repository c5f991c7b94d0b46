import csv
import importlib.util
import os
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.text import Text


def write_files(
    folder: str | os.PathLike[str],
    files: Mapping[str, Callable[[pathlib.Path], Any]],
    console: Console,
) -> None:
    """Writes files into a folder, by a function of a path for each name, and prints
    where they are. Figures, whose names end in `.png`, are only drawn if matplotlib is
    installed."""
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    can_draw = importlib.util.find_spec("matplotlib") is not None
    paths = [folder / name for name in files if can_draw or not name.endswith(".png")]
    for path in paths:
        files[path.name](path)
    written = ", ".join(map(str, paths))
    console.print(Text(f"\nWrote {written}."), soft_wrap=True)


def write_csv(
    path: pathlib.Path, names: Sequence[str], rows: Iterable[Sequence[Any]]
) -> None:
    """Writes the names of columns, and rows."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(names)
        writer.writerows(rows)
