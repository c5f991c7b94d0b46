"""Runs the native kernels on random weights, compiled with sanitizers of addresses and
undefined behaviour, and once more with that of threads, or with only one of these, and
compares what they compute with plain sums:

    python -m tests.native.sanitize [SEED [CASES [address,undefined | thread]]]
"""

import pathlib
import subprocess
import sys
import tempfile

import eqquant
from eqquant.kernels.native.build import (
    array_units,
    compile_all,
    find_compiler,
    kernel_units,
    run,
)


kernels = pathlib.Path(eqquant.__file__).parent / "kernels/native/src"
check = pathlib.Path(__file__).with_name("check.cpp")


def main(seed: str = "0", cases: str = "300", *some: str) -> int:
    for sanitizers in some or ("address,undefined", "thread"):
        # Threads take longer, and do not depend on what they compute.
        number = int(cases) if sanitizers != "thread" else max(1, int(cases) // 4)
        with tempfile.TemporaryDirectory() as name:
            code = _check(pathlib.Path(name), sanitizers, seed, str(number))
        if code != 0:
            return code
    return 0


def _check(folder, sanitizers, seed, cases):
    compiler = find_compiler()
    flags = [f"-fsanitize={sanitizers}", "-fno-sanitize-recover=all", "-O1", "-g1"]
    objects = compile_all(
        [*kernel_units(), *array_units()], compiler, kernels, folder, flags
    )
    program = str(folder / "check")
    run(
        [*compiler, "-std=c++17", *flags, "-Wall", "-Wextra", "-Werror", "-pthread"]
        + [f"-I{kernels}", str(check), *objects, "-o", program]
    )
    print(f"{sanitizers}: seed {seed}, {cases} cases", flush=True)
    return subprocess.run([program, seed, cases]).returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
