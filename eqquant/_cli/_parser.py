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
    """Reports an error of the user in one line, and returns the exit status."""
    line = " ".join(str(message).split())
    print(f"eqquant {command}: {line}", file=sys.stderr)
    return 2
