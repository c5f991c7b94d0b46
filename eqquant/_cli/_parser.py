import argparse
import pathlib
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


def add_flag(parser: argparse.ArgumentParser, name: str, help: str) -> None:
    """Adds an option that is true if given."""
    parser.add_argument(name, action="store_true", help=help)


def add_ordinary(parser: argparse.ArgumentParser) -> None:
    """Adds the option `--ordinary`."""
    parser.add_argument(
        "--ordinary",
        action="append",
        default=[],
        metavar="PATTERN",
        help="the names of ordinary arrays that look like parts of quantized arrays, "
        "such as 'images*'; repeatable",
    )


def add_out(parser: argparse.ArgumentParser, default: str, help: str) -> None:
    """Adds the option `--out` for a folder."""
    parser.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path(default),
        metavar="FOLDER",
        help=f"{help} (default: %(default)s)",
    )


def user_error(command: str, message: object) -> int:
    """Reports a user error in one line, and returns the exit status."""
    _print_error(command, message)
    return 2


def interrupted(command: str, what_now: str = "") -> int:
    """Reports an interruption by the user, and returns the exit status that shells use
    for it."""
    _print_error(command, f"interrupted. {what_now}")
    return 130


def _print_error(command, message):
    from .._tree import printable

    line = printable(" ".join(str(message).split()))
    print(f"{f'eqquant {command}'.rstrip()}: {line}", file=sys.stderr)
