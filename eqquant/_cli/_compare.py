import argparse
import math
import pathlib
from typing import Any

from ._parser import Parser, user_error


def add_to(commands: Any) -> Parser:
    compare = commands.add_parser(
        "compare", help="measure the errors of the arrays in a file against another"
    )
    for name, text in (("A", "the reference"), ("B", "the arrays to compare with it")):
        compare.add_argument(
            name.lower(),
            type=pathlib.Path,
            metavar=name,
            help=f"a file or folder: {text}",
        )
    compare.add_argument(
        "--rename",
        choices=("llama", "mistral", "qwen"),
        help="the family of models, if one file has the names of llama.cpp and the "
        "other those of Hugging Face",
    )
    return compare


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from ..interop import open

    console = Console()
    try:
        with open(args.a) as a, open(args.b) as b:
            of_a, of_b = _named(a, args.rename), _named(b, args.rename)
            both = [name for name in of_a if name in of_b]
            if not both:
                return user_error(
                    "compare",
                    f"{args.a} and {args.b} have no names in common: for example "
                    f"{next(iter(of_a), None)!r} and {next(iter(of_b), None)!r}.",
                )
            width = max(map(len, both))
            head = f"{'':<{width}}  {'SQNR':>9}  {'max error':>9}  format"
            console.print(Text(head, "bold"), soft_wrap=True)
            same = all([_line(n, of_a[n], of_b[n], width, console) for n in both])
    except (OSError, ValueError) as e:
        return user_error("compare", e)
    for path, names, others in ((args.a, of_a, of_b), (args.b, of_b, of_a)):
        for name in names:
            if name not in others:
                same = False
                console.print(Text(f"{name}: only in {path}", "red"), soft_wrap=True)
    return 0 if same else 1


def _named(checkpoint, rename):
    from ..interop import renamed

    entries = checkpoint.entries.items()
    return {new: entry for name, entry in entries for new in renamed(name, rename)}


def _line(name, a, b, width, console):
    from rich.text import Text

    start = f"{name:<{width}}"
    if a.shape != b.shape:
        text = f"{start}  shapes differ: {a.shape} and {b.shape}"
        console.print(Text(text, "red"), soft_wrap=True)
        return False
    ratio, largest = _error(a, b)
    sqnr = "exact" if ratio == math.inf else f"{ratio:.1f} dB"
    formats = " → ".join(dict.fromkeys(str(x.format or x.dtype.name) for x in (a, b)))
    text = f"{start}  {sqnr:>9}  {largest:>9.3g}  {formats}"
    console.print(Text(text), soft_wrap=True)
    return True


def _error(a, b):
    import numpy as np

    from .._array import sqnr

    x, y = (np.asarray(_dense(entry)) for entry in (a, b))
    if x.size == 0:
        return math.inf, 0.0
    if np.array_equal(x, y):
        return math.inf, 0.0
    x, y = x.astype(np.float32), y.astype(np.float32)
    return sqnr(x, y), float(np.max(np.abs(x - y)))


def _dense(entry):
    return entry.numpy() if entry.format is None else entry.read().dequantize()
