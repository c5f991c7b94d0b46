import argparse
import dataclasses
import importlib.metadata
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn


# Each command imports what it needs itself, so that `--help` is quick.


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}. See `{self.prog} --help`.\n")


class _Version(argparse.Action):
    def __call__(self, parser, namespace, values, option_string=None):
        print(f"eqquant {importlib.metadata.version('eqquant')}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """The command `eqquant`.

    **Arguments:**

    - `argv`: what follows the name of the command. By default, that of this process.

    **Returns:**

    The exit status: 0, or 2 for a mistake of the user's, which one line on standard
    error tells of. (Those that are mistakes of grammar raise `SystemExit`, as the
    standard library's parsers do.)
    """
    args = _parser().parse_args(argv)
    return args.run(args)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("eqquant", description="Quantized arrays for JAX and Equinox.")
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version and exit"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    demo = commands.add_parser(
        "demo",
        help="train a small language model, and quantize it in every format",
    )
    demo.add_argument("--quick", action="store_true", help="train for less long")
    demo.add_argument(
        "--fresh", action="store_true", help="train, even if the model is in the cache"
    )
    demo.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("eqquant-demo"),
        metavar="FOLDER",
        help="where to write the table and the figure (default: %(default)s)",
    )
    demo.set_defaults(run=_demo)

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
    formats.set_defaults(run=_formats)

    inspect = commands.add_parser(
        "inspect", help="tell what each array of a saved model costs"
    )
    inspect.add_argument(
        "file",
        type=pathlib.Path,
        metavar="FILE",
        help="as written by `eqquant.save`",
    )
    inspect.set_defaults(run=_inspect)
    return parser


def _demo(args: argparse.Namespace) -> int:
    from .demo import run

    if args.out.exists() and not args.out.is_dir():
        return _mistake("demo", f"--out should be a folder. Got the file {args.out}")
    run(quick=args.quick, fresh=args.fresh, out=args.out)
    return 0


def _formats(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .report import format_table, read_losses

    if args.losses is not None:
        try:
            read_losses(args.losses)
        except (OSError, ValueError) as e:
            return _mistake("formats", f"cannot read {args.losses}: {e}")
    table = format_table(args.losses)
    if args.markdown:
        print(table.markdown())
    else:
        Console().print(table)
    return 0


def _inspect(args: argparse.Namespace) -> int:
    from rich.console import Console

    from .interop import load
    from .report import Report, report

    try:
        model = load(args.file)
    except (OSError, ValueError) as e:
        return _mistake("inspect", str(e))
    # The modules are not in the file, and so neither are the reasons.
    rows = [
        dataclasses.replace(row, reason="", way_out="") for row in report(model).rows
    ]
    Console().print(Report(rows))
    return 0


def _mistake(command: str, message: str) -> int:
    print(f"eqquant {command}: {message}", file=sys.stderr)
    return 2
