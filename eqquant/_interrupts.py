"""Handles Ctrl-C while the command `eqquant` is imported, which takes a second or two
and comes before the command can catch it. This module is imported first. It has no
effect in other programs."""

import pathlib
import sys


def _is_command(arguments):
    return arguments[:2] == ["-m", "eqquant"] or (
        len(arguments) > 0 and pathlib.PurePath(arguments[0]).stem == "eqquant"
    )


def _quiet(type, value, traceback):
    if not issubclass(type, KeyboardInterrupt):
        return sys.__excepthook__(type, value, traceback)
    print("eqquant: interrupted.", file=sys.stderr)
    sys.exit(130)


if _is_command(sys.orig_argv[1:]):
    sys.excepthook = _quiet
