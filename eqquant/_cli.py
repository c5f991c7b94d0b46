import argparse
import dataclasses
import importlib.metadata
import pathlib
import re
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

    The exit status: 0; 1 if `bench --platform gpu` finds products that are wrong; or 2
    for a mistake of the user's, which one line on standard error tells of. (Those that
    are mistakes of grammar raise `SystemExit`, as the standard library's parsers do.)
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

    bench = commands.add_parser(
        "bench", help="measure how fast and how right products are on this machine"
    )
    bench.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="KxN",
        help="of a weight, contracted axis first (default: 4096x11008); repeatable",
    )
    bench.add_argument(
        "--rows",
        type=_count,
        nargs="+",
        default=(1, 128),
        metavar="M",
        help="how many rows to multiply with it (default: 1 128)",
    )
    bench.add_argument(
        "--formats",
        nargs="+",
        metavar="NAME",
        help="such as nf4; int8:int8 quantizes the rows too (default: several)",
    )
    bench.add_argument(
        "--platform",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: measure products on a GPU, next to bfloat16 (default: cpu)",
    )
    bench.add_argument(
        "--peers", action="store_true", help="measure other libraries, if installed"
    )
    bench.add_argument(
        "--no-decode", action="store_true", help="leave out the decoding of a model"
    )
    bench.add_argument(
        "--memory",
        action="store_true",
        help="of training with adapters on 4-bit weights, instead of times",
    )
    bench.add_argument(
        "--quick",
        action="store_true",
        help="in half a minute: a smaller shape, fewer rounds, no decoding",
    )
    bench.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("eqquant-bench"),
        metavar="FOLDER",
        help="where to write the tables and the figure (default: %(default)s)",
    )
    bench.set_defaults(run=_bench)

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


def _bench(args: argparse.Namespace) -> int:
    from .bench import as_quantization, run, run_memory

    if args.memory:
        run_memory(peers=args.peers)
        return 0
    if args.out.exists() and not args.out.is_dir():
        return _mistake("bench", f"--out should be a folder. Got the file {args.out}")
    if args.platform == "gpu":
        return _bench_gpu(args)
    try:
        formats = args.formats and [as_quantization(name) for name in args.formats]
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        return _mistake("bench", str(e))
    run(
        args.shape,
        args.rows,
        formats,
        peers=args.peers,
        decode=not args.no_decode,
        quick=args.quick,
        out=args.out,
    )
    return 0


def _bench_gpu(args: argparse.Namespace) -> int:
    import jax

    from .bench import run_gpu

    if (platform := jax.default_backend()) != "gpu":
        message = f"--platform gpu needs a GPU that JAX can use. Got {platform}"
        return _mistake("bench", message)
    return 0 if all(row.is_right for row in run_gpu(out=args.out)) else 1


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


def _shape(text: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"should be two positive numbers, as in 4096x11008. Got {text!r}"
        )
    k, n = match.groups()
    return int(k), int(n)


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d*", text):
        raise argparse.ArgumentTypeError(f"should be 1 or more. Got {text!r}")
    return int(text)


def _mistake(command: str, message: str) -> int:
    print(f"eqquant {command}: {message}", file=sys.stderr)
    return 2
