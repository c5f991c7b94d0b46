import argparse
import re
from typing import Any

from ._parser import add_flag, add_out, Parser, user_error


def add_to(commands: Any) -> Parser:
    bench = commands.add_parser(
        "bench", help="measure the speed and the error of products on this machine"
    )
    bench.add_argument(
        "--shape",
        type=_shape,
        action="append",
        metavar="KxN",
        help="the shape of a weight, contracted axis first (default: 4096x11008); "
        "repeatable",
    )
    bench.add_argument(
        "--rows",
        type=_count,
        nargs="+",
        metavar="M",
        help="the numbers of rows to multiply by it (default: 1 128)",
    )
    bench.add_argument(
        "--formats",
        nargs="+",
        metavar="NAME",
        help="such as nf4; int8:int8 quantizes the rows, too; all: every format that "
        "files of other libraries have, too (default: several)",
    )
    bench.add_argument(
        "--platform",
        choices=("cpu", "gpu"),
        default="cpu",
        help="gpu: measure products on a GPU, next to bfloat16 (default: cpu)",
    )
    add_flag(bench, "--peers", "measure other installed libraries, too")
    add_flag(bench, "--no-decode", "do not measure the decoding of a model")
    add_flag(
        bench,
        "--memory",
        "measure the memory of training adapters on 4-bit weights, instead of times",
    )
    add_flag(
        bench,
        "--quantize",
        "measure how fast arrays are quantized and dequantized, instead of products",
    )
    bench.add_argument(
        "--axis",
        type=int,
        choices=(-1, -2),
        default=-2,
        help="the axis that --quantize quantizes along (default: -2)",
    )
    add_flag(
        bench,
        "--llama",
        "measure how fast a model of Llama's architecture reads and generates text, "
        "beside llama.cpp where that is installed, instead of products",
    )
    add_flag(
        bench,
        "--quick",
        "take half a minute: a smaller shape, fewer rounds, no decoding",
    )
    add_out(bench, "eqquant-bench", "the folder for the tables and the figure")
    return bench


def run(args: argparse.Namespace) -> int:
    from ..bench import (
        all_formats,
        as_quantization,
        run,
        run_generation,
        run_memory,
    )

    if args.memory:
        run_memory(peers=args.peers)
        return 0
    if args.quantize:
        return _bench_conversions(args.formats, args.axis)
    if args.llama:
        try:
            run_generation(args.formats)
        except ValueError as e:
            return user_error("bench", str(e))
        return 0
    if args.out.exists() and not args.out.is_dir():
        return user_error("bench", f"--out should be a folder. Got the file {args.out}")
    if args.platform == "gpu" and (platform := _default_platform()) != "gpu":
        message = f"--platform gpu needs a GPU that JAX can use. Got {platform}"
        return user_error("bench", message)
    try:
        if args.formats == ["all"]:
            formats = all_formats()
        else:
            formats = args.formats and [as_quantization(name) for name in args.formats]
        args.out.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as e:
        return user_error("bench", str(e))
    if args.platform == "gpu":
        return _bench_gpu(args, formats)
    run(
        args.shape,
        args.rows or (1, 128),
        formats,
        peers=args.peers,
        decode=not args.no_decode,
        quick=args.quick,
        out=args.out,
    )
    return 0


def _bench_conversions(names: list[str] | None, axis: int) -> int:
    from ..bench import all_formats, run_conversions
    from ..formats import as_format

    try:
        if names == ["all"]:
            formats = list(dict.fromkeys(each.format for each in all_formats()))
        else:
            formats = names and [as_format(name) for name in names]
    except ValueError as e:
        return user_error("bench", str(e))
    run_conversions(formats, axis=axis)
    return 0


def _default_platform() -> str:
    import jax

    return jax.default_backend()


def _bench_gpu(args: argparse.Namespace, formats: Any) -> int:
    from ..bench import default_cases, gpu_formats, run_gpu
    from ..formats import AbstractExact

    formats = formats or gpu_formats
    exact = [f for f in formats if isinstance(f.format, AbstractExact)]
    if exact and args.formats != ["all"]:
        message = f"there are no kernels for GPUs for {', '.join(map(str, exact))}"
        return user_error("bench", message)
    formats = [f for f in formats if f not in exact]
    cases = default_cases
    if args.shape or args.rows:
        shapes, rows = args.shape or [(4096, 14336)], args.rows or (1, 16)
        cases = [(shape, m) for shape in shapes for m in rows]
    measured = run_gpu(cases, formats, out=args.out)
    return 0 if all(row.is_right for row in measured) else 1


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
