import argparse
import sys

from .environment import prepare


prepare()

from .run import run, run_case
from .summary import header, show


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attack")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="the number of one case to repeat")
    parser.add_argument("--verbose", action="store_true", help="each case as it begins")
    parser.add_argument(
        "--lenient", action="store_true", help="NaN and infinities are one"
    )
    arguments = parser.parse_args()
    options = dict(verbose=arguments.verbose, lenient=arguments.lenient)
    print(header(arguments.seed), flush=True)
    if arguments.case is None:
        met, failures = run(arguments.seconds, arguments.seed, **options)
    else:
        case = run_case(arguments.seed, arguments.case, **options | dict(verbose=True))
        met, failures = case.met, [(case.number, line) for line in case.failures]
    show(arguments.seed, met, failures)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
