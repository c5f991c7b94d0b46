"""Measures the CPU kernels on this machine, for developers of kernels:

    python -m eqquant.bench costs FILE
    python -m eqquant.bench choices

`eqquant bench` is for users.
"""

import argparse
import sys


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m eqquant.bench")
    commands = parser.add_subparsers(dest="command", required=True)
    costs = commands.add_parser(
        "costs", help="measure how long each kernel takes, which decides among them"
    )
    costs.add_argument("file", help="the JSON file to write")
    choices = commands.add_parser(
        "choices", help="measure how much slower the chosen kernels are than the best"
    )
    choices.add_argument("--formats", nargs="+", help="such as nf4 or int8:int8")
    choices.add_argument("--across", action="store_true", help="across the blocks")
    args = parser.parse_args()

    from rich.console import Console

    from ._costs import measure_choices, on_one_core, print_choices, write_costs
    from ._entries import progress_bar
    from ._formats import as_quantization

    on_one_core()
    with progress_bar(Console(stderr=True)) as show:
        if args.command == "costs":
            write_costs(args.file, show)
            return 0
        formats = args.formats and [as_quantization(name) for name in args.formats]
        cells = measure_choices(quantizations=formats, across=args.across, show=show)
    print_choices(cells, Console())
    return 0


if __name__ == "__main__":
    sys.exit(main())
