"""Models of any package, quantized in one call by an example of their input: `python -m
tests.example_models` prints what share of their matrices is, and how much outputs and
gradients differ from those of the same weights dequantized."""

import argparse
import importlib.util
import json
import time

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

import eqquant as eqq

from .measure import measured
from .models import examples


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.example_models")
    parser.add_argument("names", nargs="*", help="of models; all, by default")
    parser.add_argument("--format", default="nf4")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    args = parser.parse_args()
    found, missing = {}, {}
    for name in args.names or examples:
        package, make = examples[name]
        if package is not None and importlib.util.find_spec(package) is None:
            missing[name] = package
            continue
        start = time.monotonic()
        found[name] = measured(make(), eqq.formats.as_format(args.format))
        if not args.json:
            print(f"{name}: {time.monotonic() - start:.0f} s", flush=True)
    if args.json:
        measures = {name: row._asdict() for name, row in found.items()}
        print(json.dumps({"found": measures, "missing": missing}))
        return
    Console().print(_table(found))
    for name, package in missing.items():
        print(f"{name}: {package} is not installed.")


def _table(found):
    table = Table(box=SIMPLE_HEAD)
    table.add_column("model")
    for head in ("quantized", "outputs", "jitted", "d inputs", "d others", "left"):
        table.add_column(head, justify="right")
    number = lambda x: "" if x is None else f"{x:.0e}"
    for name, row in found.items():
        share, left, *differences = row
        table.add_row(name, f"{share:.2%}", *map(number, differences), ", ".join(left))
    return table


if __name__ == "__main__":
    main()
