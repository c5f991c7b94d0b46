import argparse
import dataclasses
import pathlib
from typing import Any

from ._parser import mistake


def add_to(commands: Any) -> None:
    inspect = commands.add_parser(
        "inspect", help="tell what is in a file, and what each array costs"
    )
    inspect.add_argument(
        "file",
        type=pathlib.Path,
        metavar="FILE",
        help="of safetensors or GGUF, from this or another library; or a folder",
    )
    inspect.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .._report import Report
    from ..interop import open

    try:
        with open(args.file) as checkpoint:
            rows = _own_rows(args.file) if _is_own(checkpoint) else _rows(checkpoint)
    except (OSError, ValueError) as e:
        return mistake("inspect", e)
    console = Console()
    _print_about(checkpoint, console)
    console.print(Report(rows))
    return 0


def _is_own(checkpoint):
    return checkpoint.kind == "eqquant"


def _own_rows(path):
    # Of these, what is tied to another one is known.
    from .._report import report
    from ..interop import load_struct

    # The modules are not in the file, and so neither are the reasons.
    rows = report(load_struct(path)).rows
    return [dataclasses.replace(row, reason="", hint="") for row in rows]


def _rows(checkpoint):
    from ._rows import row_of

    return [row_of(entry, after=entry.nbytes) for entry in checkpoint.entries.values()]


def _print_about(checkpoint, console):
    from rich.text import Text

    metadata = {} if _is_own(checkpoint) else checkpoint.metadata
    console.print(Text(checkpoint.kind, "bold"))
    for key, value in metadata.items():
        console.print(Text(f"  {key}: {_short(value)}"), soft_wrap=True)
    console.print()


def _short(value):
    if isinstance(value, list):
        some = ", ".join(_short(x) for x in value[:3])
        return f"[{some}{', ...' if len(value) > 3 else ''}] ({len(value)})"
    text = repr(value) if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else f"{text[:60]}..."
