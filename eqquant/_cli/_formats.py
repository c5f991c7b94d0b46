import argparse
import pathlib
from typing import Any

from ._parser import mistake


def add_to(commands: Any) -> None:
    formats = commands.add_parser(
        "formats", help="compare the formats, on samples of known distributions"
    )
    formats.add_argument("--markdown", action="store_true", help="print it in Markdown")
    formats.add_argument(
        "--losses",
        type=pathlib.Path,
        metavar="CSV",
        help="the file that the demo wrote, for a column of losses",
    )
    formats.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .._report import format_table, read_losses

    if args.losses is not None:
        try:
            read_losses(args.losses)
        except (OSError, ValueError) as e:
            return mistake("formats", f"cannot read {args.losses}: {e}")
    table = format_table(args.losses)
    if args.markdown:
        print(table.markdown())
    else:
        Console().print(table)
    return 0
