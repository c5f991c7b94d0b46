import argparse
import math
import os
import pathlib
from typing import Any

from ._parser import add_flag, add_ordinary, interrupted, Parser, user_error
from ._values import as_axis, as_bytes, as_rule, format_from_text


def add_to(commands: Any) -> Parser:
    quantize = commands.add_parser(
        "quantize",
        help="quantize the files of a model, which may be larger than memory",
    )
    quantize.add_argument(
        "source",
        type=pathlib.Path,
        metavar="IN",
        help="a safetensors or GGUF file, an index of several files, or a folder",
    )
    quantize.add_argument(
        "out",
        type=pathlib.Path,
        metavar="OUT",
        help="a folder, or a file if it ends in .safetensors or .gguf",
    )
    quantize.add_argument(
        "--format",
        default="nf4",
        metavar="FORMAT",
        help="such as nf4 or 'NF4(128)'; f32, f16 or bf16, which decodes arrays; or "
        "none, which copies them (default: %(default)s)",
    )
    quantize.add_argument(
        "--rule",
        type=as_rule,
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="the format of arrays by their names, as in '*.embed*=int8'; repeatable, "
        "and the first match decides",
    )
    quantize.add_argument(
        "--to",
        choices=("eqquant", "gguf", "mlx", "compressed-tensors"),
        help="the kind of file to write (default: gguf if OUT ends in .gguf, otherwise "
        "eqquant)",
    )
    add_ordinary(quantize)
    quantize.add_argument(
        "--axis",
        type=as_axis,
        action="append",
        metavar="[PATTERN=]AXIS",
        help="the axis that products contract: -1 for (out, in) matrices, -2 for "
        "(in, out), and as in 'conv.*=1,2,3' for filters; repeatable, and the first "
        "match decides (default: -1; for filters, all axes but the first)",
    )
    quantize.add_argument(
        "--min-size",
        type=int,
        default=1024,
        metavar="N",
        help="keep smaller arrays dense (default: %(default)s)",
    )
    add_flag(quantize, "--embeddings", "quantize embeddings, too")
    add_flag(quantize, "--requantize", "requantize arrays that are quantized already")
    quantize.add_argument(
        "--shard-size",
        type=as_bytes,
        metavar="BYTES",
        help="the largest size of a file, such as 2GB (default, in a folder: 5GB)",
    )
    data = quantize.add_mutually_exclusive_group()
    data.add_argument(
        "--imatrix",
        type=pathlib.Path,
        metavar="FILE",
        help="an importance matrix of llama.cpp, with names of arrays as in IN",
    )
    data.add_argument(
        "--statistics",
        type=pathlib.Path,
        metavar="FILE",
        help="statistics of `eqquant.calibrate`, from eqquant.save(FILE, "
        "stats.as_tree()), with names of arrays as in IN",
    )
    quantize.add_argument(
        "--method",
        choices=("gptq", "hqq", "scale-search"),
        help="how to round (default: to nearest; with statistics: gptq; with an "
        "importance matrix: scale-search)",
    )
    bare = quantize.add_mutually_exclusive_group()
    bare.add_argument(
        "--config",
        type=pathlib.Path,
        metavar="PATH",
        help="for llama.cpp, the folder of Hugging Face, or the GGUF file, with the "
        "hyperparameters and the tokenizer (default: IN, if it has a config.json)",
    )
    bare.add_argument(
        "--bare",
        action="store_true",
        help="write a GGUF file of arrays alone, by their names in IN",
    )
    add_flag(quantize, "--fresh", "start over, even if there is an OUT.partial")
    return quantize


def run(args: argparse.Namespace) -> int:
    from ..interop import convert

    try:
        stats = _statistics(args)
        method = _method(args)
        format = format_from_text(args.format)
        rules = [(name, format_from_text(text)) for name, text in args.rule]
        with _Bar() as bar:
            outcomes = convert(
                args.source,
                args.out,
                format,
                rules=rules,
                to=args.to,
                ordinary=args.ordinary,
                axis=args.axis or "auto",
                min_size=args.min_size,
                embeddings=args.embeddings,
                requantize=args.requantize,
                shard_size=args.shard_size,
                fresh=args.fresh,
                stats=stats,
                method=method,
                config=False if args.bare else args.config,
                progress=bar.update,
            )
    except ValueError as e:
        return user_error("quantize", e)
    except OSError as e:
        text = str(e).rstrip(".")
        return user_error("quantize", f"{text}. {_what_now(args)}")
    except KeyboardInterrupt:
        return interrupted("quantize", _what_now(args))
    _print(outcomes)
    return 0


def _what_now(args):
    is_begun = os.path.isdir(f"{os.path.realpath(args.out)}.partial")
    return "Run the same command again to resume." if is_begun else ""


def _statistics(args):
    if args.imatrix is not None:
        from ..interop import read_imatrix

        return read_imatrix(args.imatrix)
    if args.statistics is not None:
        return _memory_mapped(args.statistics)
    return None


def _memory_mapped(path):
    from .._trace import Statistics
    from ..interop import load_struct, open

    tree, entries = load_struct(path), open(path).entries
    for key in ("values", "rows"):
        if isinstance(tree, dict) and isinstance(tree.get(key), list):
            names = [f"{key}.{i}" for i in range(len(tree[key]))]
            tree[key] = [entries[name].numpy() for name in names]
    return Statistics.from_tree(tree)


def _method(args):
    if args.method is None and args.imatrix is None:
        return None
    from .._solvers import GPTQ, HQQ, ScaleSearch

    methods = {"gptq": GPTQ, "hqq": HQQ, "scale-search": ScaleSearch}
    return methods[args.method or "scale-search"]()


class _Bar:
    """A progress bar on standard error, shown if that is a terminal."""

    def __init__(self):
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        console = Console(stderr=True)
        self._task = None
        self._bar = Progress(
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def update(self, done: int, total: int, name: str) -> None:
        from .._tree import printable

        name = printable(name)
        # Work done by an earlier, interrupted run must not count towards the speed.
        if self._task is None:
            self._task = self._bar.add_task(name, total=total, completed=done)
        self._bar.update(self._task, completed=done, description=name)

    def __enter__(self) -> "_Bar":
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()


def _print(outcomes):
    from rich.console import Console
    from rich.text import Text

    from .._report import Report
    from .._tree import printable
    from ._rows import row_of

    console = Console()
    rows = [
        row_of(
            x,
            after=x.after,
            before=x.before,
            sqnr=x.sqnr,
            reason=x.reason if x.format is None else "",
            hint=x.hint if x.format is None else "",
        )
        for x in outcomes
    ]
    console.print(Report(rows))
    kept = [x for x in outcomes if x.reason == "quantized already" and x.hint]
    if kept:
        number = "1 array" if len(kept) == 1 else f"{len(kept)} arrays"
        text = f"\nQuantized already, and left as is: {number}, such as "
        text += f"{printable(kept[0].name)} → --requantize"
        console.print(Text(text, "yellow"), soft_wrap=True)
    measured = [x for x in outcomes if x.sqnr is not None]
    if measured:
        worst = sorted(measured, key=lambda x: x.sqnr)[:10]
        console.print(Text("\nArrays with the largest errors", "bold"))
        names = [printable(x.name) for x in worst]
        width = max(map(len, names))
        for name, x in zip(names, worst):
            sqnr = "exact" if x.sqnr == math.inf else f"{x.sqnr:.1f} dB"
            console.print(Text(f"  {name:<{width}}  {sqnr:>8}"), soft_wrap=True)
