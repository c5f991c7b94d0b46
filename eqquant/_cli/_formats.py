import argparse
import pathlib
from typing import Any

from ._parser import add_flag, Parser, user_error


def add_to(commands: Any) -> Parser:
    formats = commands.add_parser(
        "formats", help="compare the formats on samples of known distributions"
    )
    formats.add_argument(
        "--losses",
        type=pathlib.Path,
        metavar="CSV",
        help="the table.csv of the demo, for a column of losses",
    )
    add_flag(formats, "--markdown", "print the table in Markdown")
    return formats


def run(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .._report import format_table, read_losses

    if args.losses is not None:
        try:
            read_losses(args.losses)
        except (OSError, ValueError) as e:
            return user_error("formats", f"cannot read {args.losses}: {e}")
    table = format_table(args.losses)
    if args.markdown:
        print(table.markdown())
    else:
        Console().print(table)
    return 0
