from collections.abc import Sequence

from . import _bench, _compare, _demo, _formats, _inspect, _quantize
from ._parser import Parser, Version


# Each command imports what it needs itself, so that `--help` is quick.
_commands = (_demo, _bench, _formats, _quantize, _inspect, _compare)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `eqquant`.

    **Arguments:**

    - `argv`: what follows the name of the command. By default, that of this process.

    **Returns:**

    The exit status: 0; 1 if `bench --platform gpu` finds products that are wrong, or
    `compare` arrays that cannot be compared; or 2 for a mistake of the user's, which
    one line on standard error tells of. (Those that are mistakes of grammar raise
    `SystemExit`, as the standard library's parsers do.)
    """
    parser = Parser("eqquant", description="Quantized arrays for JAX and Equinox.")
    parser.add_argument(
        "--version", action=Version, nargs=0, help="print the version and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _commands:
        command.add_to(commands)
    args = parser.parse_args(argv)
    return args.run(args)
