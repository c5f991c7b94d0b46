"""Compiles the native kernels for another platform, and compares what they compute with
plain sums, on random weights, in an emulator."""

import pathlib
import shutil
import subprocess
import sys
import tempfile

from eqquant.kernels.native.build import array_units, compile_all, kernel_units, run

from .sanitize import check, kernels


def missing(needed: dict[str, str]) -> str | None:
    """The tools that are not here, of those that are needed, each with the package that
    has it."""
    found = [
        f"`{tool}` (of {package})"
        for tool, package in needed.items()
        if shutil.which(tool) is None
    ]
    return f"needs {' and '.join(found)}" if found else None


def compare(
    machine: str,
    compiler: list[str],
    emulators: dict[str, list[str]],
    seed: str,
    cases: str,
) -> int:
    """Compiles the kernels for a kind of machine, and runs them in emulators, by what
    is emulated. The result is the first exit code that is not zero."""
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        units = [*kernel_units(machine), *array_units(machine)]
        objects = compile_all(units, compiler, kernels, folder, ["-O2"])
        program = str(folder / "check.exe")
        run(
            [*compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
            + ["-static", f"-I{kernels}", str(check), *objects, "-o", program]
        )
        for emulated, emulator in emulators.items():
            print(f"{emulated}: seed {seed}, {cases} cases", flush=True)
            code = subprocess.run([*emulator, program, seed, cases]).returncode
            if code != 0:
                return code
    return 0


def refuse(why: str) -> int:
    print(f"This {why}.", file=sys.stderr)
    return 2
