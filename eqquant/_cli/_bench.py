import argparse
import pathlib
import re
from typing import Any

from ._parser import mistake


def add_to(commands: Any) -> None:
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
    bench.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ..bench import as_quantization, run, run_memory

    if args.memory:
        run_memory(peers=args.peers)
        return 0
    if args.out.exists() and not args.out.is_dir():
        return mistake("bench", f"--out should be a folder. Got the file {args.out}")
    if args.platform == "gpu":
        return _bench_gpu(args)
    try:
        formats = args.formats and [as_quantization(name) for name in args.formats]
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        return mistake("bench", str(e))
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

    from ..bench import run_gpu

    if (platform := jax.default_backend()) != "gpu":
        message = f"--platform gpu needs a GPU that JAX can use. Got {platform}"
        return mistake("bench", message)
    return 0 if all(row.is_right for row in run_gpu(out=args.out)) else 1


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
