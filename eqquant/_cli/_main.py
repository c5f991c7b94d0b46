import os
import sys
from collections.abc import Sequence

import eqquant

from .._any_encoding import any_encoding
from . import _bench, _compare, _demo, _evaluate, _formats, _inspect, _quantize
from ._parser import interrupted, Parser, user_error


_commands = (
    *(_demo, _bench, _formats, _quantize),
    *(_inspect, _compare, _evaluate),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `eqquant`.

    **Arguments:**

    - `argv`: the arguments after the name of the command. By default, the arguments of
        this process.

    **Returns:**

    The exit status: 0 for success; 1 if `bench --platform gpu` finds wrong products, or
    `compare` finds arrays that cannot be compared; 2 for a user error or for output
    that cannot be written, either of which is reported by a line on standard error; 130
    if it was interrupted. (Arguments that cannot be parsed raise `SystemExit`, as in
    `argparse`.)
    """
    parser = Parser("eqquant", description="Quantized arrays for JAX and Equinox.")
    parser.add_argument(
        "--version",
        action="version",
        version=f"eqquant {eqquant.__version__}",
        help="print the version and exit",
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _commands:
        found = command.add_to(commands)
        found.set_defaults(run=command.run, command=found.prog.split()[-1])
    with any_encoding():
        return _run(parser, argv)


def _run(parser, argv):
    status, command = 0, ""
    try:
        try:
            args = parser.parse_args(argv)
            command = args.command
            status = args.run(args)
        finally:
            if sys.stdout is not None:  # closed by the caller
                sys.stdout.flush()
    except KeyboardInterrupt:
        return interrupted(command)
    except BrokenPipeError:
        drop_output()
        return 1
    except OSError as e:
        drop_output()
        text = str(e) if e.filename else f"{e} (while printing)"
        return status or user_error(command, text)
    return status


def drop_output() -> None:
    """Discards the output that could not be written. Python would otherwise try again
    when it exits."""
    if sys.stdout is sys.__stdout__:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
