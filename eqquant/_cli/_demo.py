import argparse
from typing import Any

from ._parser import add_flag, add_out, Parser, user_error
from ._values import as_count


def add_to(commands: Any) -> Parser:
    demo = commands.add_parser(
        "demo",
        help="train a small language model, and quantize it in every format",
    )
    add_flag(demo, "--quick", "train for a shorter time")
    add_flag(demo, "--fresh", "train, even if the model is in the cache")
    add_flag(
        demo,
        "--calibrate",
        "compare rounding, calibration and formats within a budget of bits instead",
    )
    demo.add_argument(
        "--seeds",
        type=as_count,
        default=1,
        metavar="N",
        help="with --calibrate: how many sets of data to calibrate with, of which the "
        "median is shown (default: %(default)s)",
    )
    add_out(demo, "eqquant-demo", "the folder for the table and the figure")
    return demo


def run(args: argparse.Namespace) -> int:
    from ..demo import run, run_calibrated

    if args.out.exists() and not args.out.is_dir():
        return user_error("demo", f"--out should be a folder. Got the file {args.out}")
    asked = dict(quick=args.quick, fresh=args.fresh, out=args.out)
    if args.calibrate:
        run_calibrated(**asked, seeds=args.seeds)
    else:
        run(**asked)
    return 0
