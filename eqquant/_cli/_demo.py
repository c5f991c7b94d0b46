import argparse
import pathlib
from typing import Any

from ._parser import mistake


def add_to(commands: Any) -> None:
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
    demo.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ..demo import run

    if args.out.exists() and not args.out.is_dir():
        return mistake("demo", f"--out should be a folder. Got the file {args.out}")
    run(quick=args.quick, fresh=args.fresh, out=args.out)
    return 0
