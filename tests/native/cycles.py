"""Counts how long processors of ARM take for the inner loops of products, by LLVM's
models of them. It times nothing:

    python -m tests.native.cycles

This needs Debian's `g++-aarch64-linux-gnu`, and `llvm-mca` of LLVM 19 or newer.
"""

import pathlib
import re
import subprocess
import sys
import tempfile
from typing import NamedTuple

from eqquant.kernels.native import _library
from eqquant.kernels.native.build import compile_all, kernel_units

from . import arm, emulator
from .sanitize import kernels


processors = ("neoverse-n1", "neoverse-v1", "apple-m1")
models = "llvm-mca-19"


class Loop(NamedTuple):
    unit: str
    function: str  # a pattern
    instruction: str
    per_instruction: float  # weights, or products


# A product of inputs with a vector of 16 weights takes an instruction for each of the
# three digits of inputs.
_one_row = "neon_dot_int8_few_rows", "sdot", 16 / 3


def _few_rows(packing: str, points: int, offset: int) -> Loop:
    unit, instruction, weights = _one_row
    number = _library.number(f"packing.{packing}")
    function = rf"Unsigned\){points}>::add<\(Packing\){number}, \(Offset\){offset}>"
    return Loop(unit, function, instruction, weights)


def loops() -> dict[str, Loop]:
    """The loops that are counted, by what they compute: in cycles for a weight, and the
    last in products for a cycle."""
    return {
        "Int4, one row": _few_rows("4", 0, 0),
        "Int8, one row": _few_rows("8", 1, 0),
        "Q4_K, one row": _few_rows("Q4_K", 0, 2),
        "8 bits, many rows": Loop(
            "neon_i8mm_int8_pairs", r"multiply<8, 1,", "smmla", 32
        ),
    }


def missing() -> str | None:
    """The tools that are not here, if any."""
    needed = {
        arm.compiler: "Debian's g++-aarch64-linux-gnu",
        models: "Debian's llvm-19",
    }
    return emulator.missing(needed)


def count(loop: Loop, assembly: str) -> dict[str, float]:
    """How many weights or products a cycle has, by the processor, in the longest of
    the function's innermost loops that have most of the instructions."""
    found = [
        body
        for body in _innermost(assembly, loop.function)
        if sum(loop.instruction in line for line in body) >= 4
    ]
    number = max(_number(body, loop) for body in found if len(body) < 200)
    mine = [b for b in found if _number(b, loop) == number and len(b) < 200]
    body = max(mine, key=len)
    return {
        cpu: number * loop.per_instruction / _cycles(body, cpu) for cpu in processors
    }


def _number(body, loop):
    return sum(loop.instruction in line for line in body)


def _innermost(assembly, function):
    name, labels, found = "", {}, []
    lines = assembly.splitlines()
    for i, line in enumerate(lines):
        label = re.match(r"(\.?\w+):", line)
        if label and not label[1].startswith(".L"):
            name, labels = label[1], {}
        elif label:
            labels[label[1]] = i
        branch = re.match(r"\t(?:b\.?\w*|cbn?z|tbn?z)\t(?:.*, *)?(\.L\w+)", line)
        if branch and branch[1] in labels:
            found.append((name, labels[branch[1]], i))
    inner = [
        (name, first, last)
        for name, first, last in found
        if not any(
            first <= f and l <= last and (f, l) != (first, last) for _, f, l in found
        )
    ]
    names = _demangled([name for name, _, _ in inner])
    return [
        [line for line in lines[first : last + 1] if re.match(r"\t[a-z]", line)]
        for name, (_, first, last) in zip(names, inner, strict=True)
        if re.search(function, name)
    ]


def _demangled(names):
    out = subprocess.run(
        ["c++filt", *names], check=True, capture_output=True, text=True
    )
    return [
        line.replace("(anonymous namespace)::", "").replace("eqquant::", "")
        for line in out.stdout.splitlines()
    ]


def _cycles(body, cpu):
    times = 200
    command = [models, "-mtriple=aarch64-linux-gnu", f"-mcpu={cpu}", "-mattr=+i8mm"]
    command += [f"-iterations={times}", "-"]
    code = "\n".join(body)
    out = subprocess.run(
        command, input=code, check=True, capture_output=True, text=True
    )
    found = re.search(r"Total Cycles:\s+(\d+)", out.stdout)
    assert found is not None, out.stdout
    return int(found[1]) / times


def main() -> int:
    why = missing()
    if why is not None:
        return emulator.refuse(why)
    all_loops = loops()
    wanted = {loop.unit for loop in all_loops.values()}
    units = [unit for unit in kernel_units("aarch64") if unit.name in wanted]
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        compile_all(units, [arm.compiler], kernels, folder, ["-O3", "-fPIC", "-S"])
        texts = {unit: (folder / f"{unit}.o").read_text() for unit in wanted}
    print("| |", " | ".join(processors), "|")
    print("|---|" + "--:|" * len(processors))
    for what, loop in all_loops.items():
        found = count(loop, texts[loop.unit])
        many = loop.instruction == "smmla"
        if many:  # Which the others do not have.
            found = {cpu: x for cpu, x in found.items() if cpu == "neoverse-v1"}
        shown = (
            ("" if x is None else f"{x:.0f}" if many else f"{1 / x:.3f}")
            for x in map(found.get, processors)
        )
        print(f"| {what} |", " | ".join(shown), "|")
    return 0


if __name__ == "__main__":
    sys.exit(main())
