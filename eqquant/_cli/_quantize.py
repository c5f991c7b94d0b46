import argparse
import math
import pathlib
from typing import Any

from ._parser import mistake
from ._values import as_axis, as_bytes, as_rule, format_from_text


def add_to(commands: Any) -> None:
    quantize = commands.add_parser(
        "quantize",
        help="quantize the files of a model, which may be larger than memory",
    )
    quantize.add_argument(
        "source",
        type=pathlib.Path,
        metavar="IN",
        help="a file of safetensors or GGUF, an index of several, or a folder",
    )
    quantize.add_argument(
        "out",
        type=pathlib.Path,
        metavar="OUT",
        help="a folder; or a file, if it ends with .safetensors or .gguf",
    )
    quantize.add_argument(
        "--format",
        default="nf4",
        metavar="FORMAT",
        help="such as nf4, 'NF4(128)', or none (default: %(default)s)",
    )
    quantize.add_argument(
        "--rule",
        type=as_rule,
        action="append",
        default=[],
        metavar="PATTERN=FORMAT",
        help="for arrays by their names, as in '*.embed*=int8'; repeatable, and the "
        "first that matches decides",
    )
    quantize.add_argument(
        "--to",
        choices=("eqquant", "gguf", "mlx", "compressed-tensors"),
        help="what to write (default: gguf if OUT ends so, otherwise eqquant)",
    )
    quantize.add_argument(
        "--axis",
        type=as_axis,
        action="append",
        metavar="[PATTERN=]AXIS",
        help="that products contract: -1 of matrices (out, in), -2 of (in, out); "
        "repeatable, and the first that matches decides (default: -1)",
    )
    quantize.add_argument(
        "--min-size",
        type=int,
        default=1024,
        metavar="N",
        help="leave smaller arrays as they are (default: %(default)s)",
    )
    quantize.add_argument(
        "--embeddings", action="store_true", help="quantize embeddings too"
    )
    quantize.add_argument(
        "--requantize",
        action="store_true",
        help="quantize anew what is quantized already",
    )
    quantize.add_argument(
        "--shard-size",
        type=as_bytes,
        metavar="BYTES",
        help="the largest size of a file, such as 2GB (default, in a folder: 5GB)",
    )
    quantize.add_argument(
        "--fresh",
        action="store_true",
        help="begin anew, even if there is an unfinished OUT.partial",
    )
    quantize.set_defaults(run=_run)


def _run(args: argparse.Namespace) -> int:
    from ..interop import convert

    try:
        format = format_from_text(args.format)
        rules = [(name, format_from_text(text)) for name, text in args.rule]
        with _Bar() as bar:
            outcomes = convert(
                args.source,
                args.out,
                format,
                rules=rules,
                to=args.to,
                axis=args.axis or -1,
                min_size=args.min_size,
                embeddings=args.embeddings,
                requantize=args.requantize,
                shard_size=args.shard_size,
                fresh=args.fresh,
                progress=bar.update,
            )
    except (OSError, ValueError) as e:
        return mistake("quantize", e)
    except KeyboardInterrupt:
        return mistake("quantize", "interrupted. The same command goes on from here.")
    _print(outcomes)
    return 0


class _Bar:
    """A progress bar on standard error, if that is a terminal."""

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
            TextColumn("{task.description}"),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )

    def update(self, done: int, total: int, name: str) -> None:
        # What an earlier run has done says nothing of the speed of this one.
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
    from ._rows import row_of

    console = Console()
    rows = [
        row_of(
            x,
            after=x.after,
            before=x.before,
            sqnr=x.sqnr,
            reason=x.reason if x.format is None else "",
            hint=x.way_out if x.format is None else "",
        )
        for x in outcomes
    ]
    console.print(Report(rows))
    measured = [x for x in outcomes if x.sqnr is not None]
    if measured:
        worst = sorted(measured, key=lambda x: x.sqnr)[:10]
        console.print(Text("\nThe least like what they were", "bold"))
        width = max(len(x.name) for x in worst)
        for x in worst:
            sqnr = "exact" if x.sqnr == math.inf else f"{x.sqnr:.1f} dB"
            console.print(Text(f"  {x.name:<{width}}  {sqnr:>8}"), soft_wrap=True)
