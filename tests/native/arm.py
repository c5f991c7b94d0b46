"""Compiles the native kernels for 64-bit ARM, and compares what they compute with plain
sums, on random weights, in an emulator of such processors: one that has all features
that kernels use, and one that has none of them:

    python -m tests.native.arm [SEED [CASES]]

This needs a cross-compiler and an emulator: on Debian, the packages
`g++-aarch64-linux-gnu` and `qemu-user`.
"""

import pathlib
import shutil
import subprocess
import sys
import tempfile

from eqquant.kernels.native.build import array_units, compile_all, kernel_units, run

from .sanitize import check, kernels


compiler, emulator = "aarch64-linux-gnu-g++", "qemu-aarch64"
processors = ("max", "cortex-a72")


def missing() -> str | None:
    """The tools that are not here, if any."""
    needed = ((compiler, "g++-aarch64-linux-gnu"), (emulator, "qemu-user"))
    found = [
        f"`{tool}` (of Debian's {package})"
        for tool, package in needed
        if shutil.which(tool) is None
    ]
    return f"needs {' and '.join(found)}" if found else None


def main(seed: str = "0", cases: str = "100") -> int:
    why = missing()
    if why is not None:
        print(f"This {why}.", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        units = [*kernel_units("aarch64"), *array_units("aarch64")]
        objects = compile_all(units, [compiler], kernels, folder, ["-O2"])
        program = str(folder / "check")
        run(
            [compiler, "-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-pthread"]
            + ["-static", f"-I{kernels}", str(check), *objects, "-o", program]
        )
        for processor in processors:
            print(f"{processor}: seed {seed}, {cases} cases", flush=True)
            command = [emulator, "-cpu", processor, program, seed, cases]
            code = subprocess.run(command).returncode
            if code != 0:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
