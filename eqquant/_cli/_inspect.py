import argparse
import dataclasses
import pathlib
from typing import Any

from ._parser import Parser, user_error


def add_to(commands: Any) -> Parser:
    inspect = commands.add_parser(
        "inspect", help="list the arrays in a file, with their formats and sizes"
    )
    text = "a safetensors or GGUF file of this or another library, or a folder"
    inspect.add_argument("file", type=pathlib.Path, metavar="FILE", help=text)
    return inspect


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .._report import Report
    from ..interop import open

    try:
        with open(args.file) as checkpoint:
            rows = _own_rows(args.file) if _is_own(checkpoint) else _rows(checkpoint)
    except (OSError, ValueError) as e:
        return user_error("inspect", e)
    console = Console()
    _print_about(checkpoint, console)
    console.print(Report(rows))
    return 0


def _is_own(checkpoint):
    return checkpoint.kind == "eqquant"


def _is_header(key):
    return key.startswith("eqquant")


def _own_rows(path):
    # (Files of this library record which arrays are tied.)
    from .._report import report
    from ..interop import load_struct

    # Leave out the reasons why arrays are dense: they would need the modules.
    rows = report(load_struct(path)).rows
    return [dataclasses.replace(row, reason="", hint="") for row in rows]


def _rows(checkpoint):
    from ._rows import row_of

    rows = []
    for entry in checkpoint.entries.values():
        row = row_of(entry, after=entry.nbytes)
        unread = [source.kind for source in entry.sources if source.dtype is None]
        rows.append(dataclasses.replace(row, dtype=unread[0]) if unread else row)
    return rows


def _print_about(checkpoint, console):
    from rich.text import Text

    from .._tree import printable

    # (Leave out eqquant's own header: it describes the arrays, which are listed below.)
    metadata = {k: v for k, v in checkpoint.metadata.items() if not _is_header(k)}
    console.print(Text(checkpoint.kind, "bold"))
    for key, value in metadata.items():
        text = f"  {printable(key)}: {_short(value)}"
        console.print(Text(text), soft_wrap=True)
    console.print()


def _short(value):
    if isinstance(value, list):
        some = ", ".join(_short(x) for x in value[:3])
        return f"[{some}{', ...' if len(value) > 3 else ''}] ({len(value)})"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
