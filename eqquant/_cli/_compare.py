import argparse
import pathlib
from typing import Any

from ._differences import difference
from ._parser import add_ordinary, Parser, user_error


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
        "other has the names of Hugging Face",
    )
    add_ordinary(compare)
    return compare


def run(args: argparse.Namespace) -> int:
    from rich.console import Console
    from rich.text import Text

    from .._tree import printable

    console = Console()
    try:
        opened = lambda path: _opened(path, args.ordinary)
        with opened(args.a) as a, opened(args.b) as b:
            of_a, of_b = _named(a, args.rename), _named(b, args.rename)
            both = [name for name in of_a if name in of_b]
            if not both:
                return user_error(
                    "compare",
                    f"{args.a} and {args.b} have no names in common: for example "
                    f"{next(iter(of_a), None)!r} and {next(iter(of_b), None)!r}.",
                )
            width = max(len(printable(name)) for name in both)
            head = f"{'':<{width}}  {'SQNR':>9}  {'max error':>9}  format"
            console.print(Text(head, "bold"), soft_wrap=True)
            same = all([_line(n, of_a[n], of_b[n], width, console) for n in both])
    except (OSError, ValueError) as e:
        return user_error("compare", e)
    for path, names, others in ((args.a, of_a, of_b), (args.b, of_b, of_a)):
        for name in names:
            if name not in others:
                same = False
                text = f"{printable(name)}: only in {path}"
                console.print(Text(text, "red"), soft_wrap=True)
    return 0 if same else 1


def _opened(path, ordinary):
    from ..interop import open

    checkpoint = open(path)
    # (GGUF files and eqquant's files declare the format of each array.)
    if not ordinary or checkpoint.kind in ("gguf", "eqquant"):
        return checkpoint
    checkpoint.close()
    return open(path, ordinary=ordinary)


def _named(checkpoint, rename):
    from ..interop import renamed

    entries = checkpoint.entries.items()
    return {new: entry for name, entry in entries for new in renamed(name, rename)}


def _line(name, a, b, width, console):
    from rich.text import Text

    from .._tree import printable

    start = f"{printable(name):<{width}}"
    if a.shape != b.shape:
        text = f"{start}  shapes differ: {a.shape} and {b.shape}"
        console.print(Text(text, "red"), soft_wrap=True)
        return False
    found = difference(_dense(a), _dense(b))
    sqnr = "exact" if found.is_exact else f"{found.sqnr:.1f} dB"
    formats = " → ".join(dict.fromkeys(str(x.format or x.dtype.name) for x in (a, b)))
    text = f"{start}  {sqnr:>9}  {found.largest:>9.3g}  {formats}"
    console.print(Text(text), soft_wrap=True)
    return True


def _dense(entry):
    return entry.numpy() if entry.format is None else entry.read().dequantize()
