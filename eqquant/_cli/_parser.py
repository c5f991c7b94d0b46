import argparse
import importlib.metadata
import sys
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


class Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        print(f"eqquant {importlib.metadata.version('eqquant')}")
        parser.exit()


def mistake(command: str, message: object) -> int:
    """Tells of a mistake of the user's, in one line. Returns the exit status."""
    line = " ".join(str(message).split())
    print(f"eqquant {command}: {line}", file=sys.stderr)
    return 2
