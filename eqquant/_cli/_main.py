from collections.abc import Sequence

import eqquant

from . import _bench, _compare, _demo, _evaluate, _formats, _inspect, _quantize
from ._parser import Parser


_commands = (
    *(_demo, _bench, _formats, _quantize),
    *(_inspect, _compare, _evaluate),
)


def main(argv: Sequence[str] | None = None) -> int:
    """The command `eqquant`.

    **Arguments:**

    - `argv`: the arguments after the name of the command. By default, those of this
        process.

    **Returns:**

    The exit status: 0 for success; 1 if `bench --platform gpu` finds wrong products, or
    `compare` finds arrays that cannot be compared; 2 for an error of the user, which is
    reported by a line on standard error. (Arguments that cannot be parsed raise
    `SystemExit`, as in `argparse`.)
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
        command.add_to(commands).set_defaults(run=command.run)
    args = parser.parse_args(argv)
    return args.run(args)
